"""The gateway's background state: configuration, fleet, telemetry, records, and what it publishes of itself."""
