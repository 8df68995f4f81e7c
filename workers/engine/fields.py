"""Typed reads of request fields. Every error is a 400 that names the field. null means absent; a bool is not a
number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.engine.errors import HttpError

Body = Mapping[str, Any]
INT64 = 1 << 63


def integer(body: Body, name: str, default: int | None = None, low: int = -INT64, high: int = INT64 - 1) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise HttpError(f"{name} must be an integer", name)
    if not low <= value <= high:
        bounds = f"at least {low}" if high == INT64 - 1 else f"between {low} and {high}"
        raise HttpError(f"{name} must be {bounds}, got {value}", name)
    return value


def number(body: Body, name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise HttpError(f"{name} must be a number", name)
    if not low <= value <= high:
        raise HttpError(f"{name} must be between {low} and {high}, got {value}", name)
    return float(value)


def boolean(body: Body, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise HttpError(f"{name} must be true or false", name)
    return value


def string(body: Body, name: str, default: str = "") -> str:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise HttpError(f"{name} must be a string", name)
    return value


def strings(body: Body, name: str, most: int) -> tuple[str, ...]:
    """One string or a list of strings, none of them empty."""
    value = body.get(name)
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(item, str) and item for item in found):
        raise HttpError(f"{name} must be a non-empty string or a list of them", name)
    if len(found) > most:
        raise HttpError(f"{name} may hold at most {most} strings, got {len(found)}", name)
    return tuple(found)


def integers(body: Body, name: str, most: int, low: int, high: int) -> frozenset[int]:
    """A list of integers."""
    value = body.get(name)
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise HttpError(f"{name} must be a list of integers", name)
    if len(value) > most:
        raise HttpError(f"{name} may hold at most {most} integers, got {len(value)}", name)
    for item in value:
        if not low <= item <= high:
            raise HttpError(f"{name} must hold integers between {low} and {high}, got {item}", name)
    return frozenset(value)


def mapping(body: Body, name: str) -> Body:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise HttpError(f"{name} must be an object", name)
    return value
