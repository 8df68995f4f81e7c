"""The fleet of a simulation: its driver, engines, KV in flight, scaling, failures, and its monitoring."""
