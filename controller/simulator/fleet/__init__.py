"""The fleet of a simulation: engines, their network, scaling, failures, and its monitoring."""
