"""What a gateway knows and publishes: configuration, fleet, telemetry, queue, records, metrics."""
