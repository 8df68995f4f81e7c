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


def number(value: float, unit: str) -> str:
    """Four digits are shown; a time below a second in ms. "1 request", "2 requests"."""
    sign, size = (MINUS if value < 0 else ""), abs(value)
    if unit == "s":
        return f"{sign}{_digits(size * 1000)} ms" if 0 < size < 0.99995 else f"{sign}{_digits(size)} s"
    if unit == "share":
        return f"{sign}{_digits(size * 100)} %"
    if unit == "times":
        return f"{sign}{size:.3g}×"
    if unit in ("bytes", "bytes/s"):
        return sign + _bytes(size, unit.removeprefix("bytes"))
    if not unit:  # an order's number is no amount: no separators
        return f"{sign}{size:.4g}" if isinstance(size, float) else f"{sign}{size}"
    noun, slash, per = unit.partition("/")
    return f"{sign}{_digits(size)} {noun.removesuffix('s') if size == 1 else noun}{slash}{per}"


def _digits(size: float) -> str:
    if isinstance(size, int) or size >= 1000:
        return f"{size:,.0f}"
    return f"{size:.4g}"


def _bytes(size: float, per: str) -> str:
    """Decimal, as networks count."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * step:  # else three digits of the smaller unit would be 1e+03
            return f"{size / step:.3g} {unit}{per}"
    return f"{size:.3g} B{per}"
