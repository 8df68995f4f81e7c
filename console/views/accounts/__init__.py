"""Who may send requests or sign in: tenants with API keys, service accounts with tokens, sign-in and sessions."""
