"""Sign-in, sessions, roles, tenants and keys."""
