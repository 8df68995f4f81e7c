"""Long lists: keyset pages and exports."""
