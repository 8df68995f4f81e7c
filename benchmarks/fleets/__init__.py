"""Fleets unlike the demo's, as experiments of the simulator, for bench-fleets and bench-prune."""
