"""The two HTTP APIs: `control` (the control API, /api/v1) and `openai` (the data path, /v1). The modules here belong to
the control API: authentication, permissions, errors, the OpenAPI document."""
