"""Reads for experiments: their results, and recorded traffic and fleets as input of the simulator."""
