"""The two HTTP APIs: `control` (the control API, /api/v1) and `openai` (the data path, /v1). They share no modules."""
