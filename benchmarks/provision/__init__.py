"""What `make bench-provision` looks at: emulated engines, launchers and a cluster's Jobs REST."""
