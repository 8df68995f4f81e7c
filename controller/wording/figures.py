"""Recorded figures as people read them: a name in words and a value with its unit, both from `figure_names`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from controller.wording.figure_names import NAMES, VALUES
from controller.wording.reasons import reason_in_words
from controller.wording.units import DASH, MINUS, number

RAW_MOST = 300  # characters of a raw value on hover; all of it is in the record's JSON


class Figure(NamedTuple):
    """`raw`: key and value as they are recorded."""

    name: str
    value: str
    raw: str

    @property
    def text(self) -> str:
        """`waited 1.2 s`, and with a colon before what is no number: `policy: baseline`."""
        number = self.value[:1].isdigit() or self.value[:1] in (MINUS, DASH)
        return f"{self.name}{' ' if number else ': '}{self.value}"


def named(key: str) -> str:
    """A key without an entry reads as its own words, so nothing is ever hidden."""
    return NAMES[key][0] if key in NAMES else key.replace("_", " ")


def figure(key: str, value: Any) -> Figure:
    recorded = value if isinstance(value, str) else json.dumps(value, default=str)
    return Figure(named(key), shown(key, value), f"{key}: {recorded}"[:RAW_MOST])


def line(values: Mapping[str, Any] | None) -> str:
    """On one line: `queue 4 requests · left to its first-token time 1.2 s`."""
    return " · ".join(figure(key, value).text for key, value in (values or {}).items())


def shown(key: str, value: Any, unit: str | None = None) -> str:
    """A value with its unit. `unit`: of what holds it, for keys that are no figures' (a tenant's name, an id)."""
    unit = NAMES[key][1] if key in NAMES else unit or ""
    if isinstance(value, Mapping):
        return ", ".join(_inner(name, each, unit) for name, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return _listed(key, value, unit)
    if unit == "at" and (at := moment(value)):
        return f"{at:%Y-%m-%d %H:%M:%S} UTC"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value, unit)
    return _word(key, value, unit)


def _word(key: str, value: Any, unit: str) -> str:
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    if text in VALUES.get(key, {}):
        return VALUES[key][text]
    return reason_in_words(text) if unit == "code" else text.replace("_", " ") if unit == "word" else text


def moment(value: Any) -> datetime | None:
    """From an ISO text or epoch seconds; None for anything else."""
    try:
        at = datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else datetime.fromisoformat(value)
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, TypeError, OverflowError, OSError):
        return None


def _inner(key: str, value: Any, unit: str) -> str:
    """One of a figure's own parts; names that are no keys of ours (ids, classes) stay as they are."""
    if unit == "codes":
        return f"{reason_in_words(key)}: {shown('', value)}"
    name = named(key) if key in NAMES else f"{key}:"
    text = shown(key, value, unit)
    return f"{name.rstrip(':')} ({text})" if isinstance(value, Mapping | list | tuple) else f"{name} {text}"


def _listed(key: str, values: list[Any] | tuple[Any, ...], unit: str) -> str:
    """Of objects each stands in brackets. A priority mapping's levels are numbered from 0."""
    if not values:
        return "none"
    if not all(isinstance(each, Mapping) for each in values):
        return ", ".join(shown(key, each, unit) for each in values)
    words = (f"({', '.join(_inner(name, part, '') for name, part in each.items())})" for each in values)
    return ", ".join(f"{number} {each}" for number, each in enumerate(words))
