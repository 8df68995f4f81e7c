"""SLO classes and priority mappings."""
