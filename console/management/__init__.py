"""Management commands, and the demo that one of them stores."""
