"""Writes of who may come in: sessions of people."""
