"""SLO classes and priority mappings: their forms, previews, conflicts and histories. No other pages."""
