"""Whole numbers in form data and URLs: versions, priorities, ids of decisions."""

from __future__ import annotations

MOST_DIGITS = 18  # fits PostgreSQL's bigint


def number_of(text: str) -> int | None:
    """None unless a whole number. `isdigit` alone would accept "²" and 5,000 digits, which `int` rejects."""
    plain = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if plain else None
