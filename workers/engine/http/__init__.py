"""The engine's HTTP side: requests checked, responses formatted, management endpoints."""
