"""Reads of the fleet: hosts, links, weights, latencies, cost, and the history of the scaler."""
