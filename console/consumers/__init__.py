"""Live topics over websockets: one topic a file."""
