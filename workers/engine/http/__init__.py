"""The engine's HTTP interface: validation of requests, formats of responses, management endpoints."""
