"""Scaling as operators follow and change it."""
