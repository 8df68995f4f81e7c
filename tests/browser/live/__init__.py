"""Pages that change by themselves, and what they show when they cannot."""
