"""The two HTTP APIs: `control` (REST, /api/v1), `openai` (the data path, /v1), and the errors and access they share."""
