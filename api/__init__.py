"""The two HTTP APIs: `control` (REST, /api/v1) and `openai` (the data path, /v1), and what both share of errors and access."""
