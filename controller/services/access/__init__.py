"""Writes of who may come in: sessions of people, service accounts and their tokens."""
