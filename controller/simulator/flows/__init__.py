"""Flows over a network in virtual time: the fluid network, and flow schedulers that give turns on it."""
