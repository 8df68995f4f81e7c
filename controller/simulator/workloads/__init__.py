"""Workloads of a simulation: arrivals, lengths, targets, and programs of several calls."""
