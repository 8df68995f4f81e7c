"""What `make bench-flow` measures with real processes: permits of a transfer daemon, orders of the coordinator."""
