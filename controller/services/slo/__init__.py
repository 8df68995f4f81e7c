"""Writes of what is promised, and to whom: tenants, API keys, SLO classes, priority mappings."""
