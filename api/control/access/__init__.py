"""Who may call the control API: authentication, permissions, request limits, and records of refused calls."""
