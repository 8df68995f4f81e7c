"""Measurements of the PyTorch executor: the times of its operators, and its latency profile."""
