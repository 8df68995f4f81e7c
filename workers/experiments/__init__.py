"""Runs experiments in the analysis worker: the runs, the sample of a preview, and the shipped latency profiles."""
