"""Measured times of the operators of a layer, from which the boundaries inside a step follow.

FlowPrefill takes blocking times from per-operator profiles (sec. 5.1, 6.4); without one,
`controller.predict.boundaries` composes them from the profile of whole steps. A profile has one row for each measured
prefill step, in seconds of one layer:

    {"layers": 32, "rows": [{"tokens": 512, "past": 0, "qkv_proj": 1.1e-4, "attn": 4e-5, "o_proj": 7e-5,
                             "gate_up_proj": 4.6e-4, "down_proj": 2.3e-4}, ...]}

`tokens` are computed in the step, `past` (0) were cached before; `python -m benchmarks.torch.operators` writes this
form. Projections are interpolated linearly by tokens, and attention by new x (new + 2 x past), the squares of eq. 1.
Rows at the same point are averaged. Below the smallest point its value holds (an operator costs its launch), above the
largest one the last line continues, and a single point grows in proportion. Under tensor parallelism o_proj and
down_proj are measured with their all-reduce.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.core.errors import ConfigError

OPERATORS = ("qkv_proj", "attn", "o_proj", "gate_up_proj", "down_proj")
WORDS = ("name", "source", "machine", "setting", "note")  # optional descriptions in a file


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over a size, in ascending order of size."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        held: dict[float, list[float]] = defaultdict(list)
        for size, seconds in points:
            held[size].append(seconds)
        sizes = sorted(held)
        return cls(tuple(sizes), tuple(sum(held[size]) / len(held[size]) for size in sizes))

    def at(self, size: float) -> float:
        """Seconds at a size; never negative, and 0 only where the measurement is."""
        last = len(self.sizes) - 1
        if size <= self.sizes[0]:
            return self.seconds[0]
        if last == 0:
            return self.seconds[0] * size / self.sizes[0] if self.sizes[0] else self.seconds[0]
        left = min(bisect_right(self.sizes, size) - 1, last - 1)
        span = self.sizes[left + 1] - self.sizes[left]
        slope = (self.seconds[left + 1] - self.seconds[left]) / span
        found = self.seconds[left] + slope * (size - self.sizes[left])
        return max(found, self.seconds[last]) if size > self.sizes[last] else found


@dataclass(frozen=True, slots=True)
class OperatorProfile:
    """`curves`: one for each of OPERATORS, in that order; `attn` over squares, the others over tokens."""

    layers: int
    curves: tuple[Curve, ...]

    def durations(self, tokens: int, squares: int) -> tuple[float, ...]:
        """Seconds of one layer's operators in a prefill step of `tokens`, with `squares` = sum new * (new + 2 past)."""
        return tuple(
            curve.at(float(squares if name == "attn" else tokens))
            for name, curve in zip(OPERATORS, self.curves, strict=True)
        )


def read_operator_profile(raw: Any, layers: int) -> OperatorProfile:
    """Read a profile from plain JSON values; `layers` applies if they give none.

    Raises ConfigError with the path of the wrong value.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError("an operator profile must be an object or a path", field="")
    if unknown := sorted(set(raw) - {"layers", "rows", *WORDS}):
        valid = ", ".join(sorted({"layers", "rows", *WORDS}))
        raise ConfigError(f"an operator profile has no field {unknown[0]!r}; valid: {valid}", field=unknown[0])
    layers = raw.get("layers", layers)
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise ConfigError(f"layers must be a whole number of at least 1, not {layers!r}", field="layers")
    rows = raw.get("rows")
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise ConfigError("rows must be a list of measured steps, not empty", field="rows")
    checked = [_row(row, f"rows[{index}]") for index, row in enumerate(rows)]
    curves = tuple(
        Curve.through((row["squares" if name == "attn" else "tokens"], row[name]) for row in checked)
        for name in OPERATORS
    )
    if not any(any(curve.seconds) for curve in curves):
        raise ConfigError("some operator must take time", field="rows")
    return OperatorProfile(layers, curves)


def _row(raw: Any, where: str) -> dict[str, float]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} must be an object", field=where)
    if unknown := sorted(set(raw) - {"tokens", "past", *OPERATORS}):
        valid = ", ".join(("tokens", "past", *OPERATORS))
        raise ConfigError(f"{where} has no field {unknown[0]!r}; valid: {valid}", field=f"{where}.{unknown[0]}")
    tokens = _number(raw, "tokens", where, least=1)
    past = _number({"past": 0, **raw}, "past", where)
    seconds = {name: _number(raw, name, where) for name in OPERATORS}
    return {"tokens": tokens, "squares": tokens * (tokens + 2 * past), **seconds}


def _number(raw: Mapping[str, Any], name: str, where: str, least: float = 0.0) -> float:
    if name not in raw:
        raise ConfigError(f"{where}.{name} is missing", field=f"{where}.{name}")
    try:
        value = float(raw[name]) if not isinstance(raw[name], bool) else math.nan
    except (TypeError, ValueError):
        value = math.nan
    if not least <= value < math.inf:
        raise ConfigError(
            f"{where}.{name} must be a number of at least {least:g}, not {raw[name]!r}", field=f"{where}.{name}"
        )
    return value
