"""Queue, requests, flows and workflows."""
