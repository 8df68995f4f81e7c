"""Rows turned into plain Plotly dicts."""
