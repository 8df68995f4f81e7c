"""Reads of what was recorded: requests, attainment, usage, decisions."""
