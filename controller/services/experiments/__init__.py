"""Writes of experiments and traces: commands of people, resolved specs, and runs in a worker."""
