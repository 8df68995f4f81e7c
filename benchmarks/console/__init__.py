"""Parts of `make bench-console`."""
