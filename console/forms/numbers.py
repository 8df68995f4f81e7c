"""Whole numbers in what a page posts or links to: versions, priorities, numbers of decisions."""

from __future__ import annotations

MOST_DIGITS = 18  # fits PostgreSQL's bigint


def number_of(text: str) -> int | None:
    """None for what is none: `isdigit` alone would let through "²" and 5,000 digits, which `int` refuses."""
    plain = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if plain else None
