"""Measured times and counts as sentences and pages print them."""

from __future__ import annotations

from typing import Literal

DASH = "–"
MINUS = "−"
LEAST_S = 1e-6  # a shorter time reads as "less than": more places would not be read


def ms(seconds: float | Literal[""] | None) -> str:
    """Seconds as ms below one second, as s below two minutes, as min above."""
    if seconds is None or seconds == "":
        return DASH
    sign, size = (MINUS if seconds < 0 else ""), abs(seconds)
    if size < 0.01:
        return f"{sign}{size * 1000:.1f} ms"
    if size < 0.9995:
        return f"{sign}{size * 1000:.0f} ms"
    if size < 10:
        return f"{sign}{size:.2f} s"
    return f"{sign}{size:.1f} s" if size < 120 else f"{sign}{size / 60:.0f} min"


def count(value: float | Literal[""] | None) -> str:
    return DASH if value is None or value == "" else f"{value:,.0f}"


def took(seconds: float) -> str:
    """With its unit, rounded for reading, never with an exponent."""
    if 0 < seconds < LEAST_S * (1 - 1e-9):
        return f"less than {took(LEAST_S)}"
    size, unit = (seconds * 1000, "ms") if seconds < 0.9995 else (seconds, "s")
    places = 0 if size >= 99.95 or (unit == "ms" and size >= 9.95) else _places(size, unit)
    text = f"{size:,.{places}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def _places(size: float, unit: str) -> int:
    if unit == "s":
        return 1 if size >= 9.995 else 2
    return 1 if size >= 0.95 else 3
