"""Template filters: units and links."""
