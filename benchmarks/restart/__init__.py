"""Parts of bench-restart."""
