"""The gateway's background state: configuration, fleet, telemetry and records."""
