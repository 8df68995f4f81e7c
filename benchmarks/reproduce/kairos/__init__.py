"""Kairos' figures."""
