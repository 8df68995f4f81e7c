"""Logs of live gateways for replays: `python -m benchmarks.scheduler_logs FOLDER`."""
