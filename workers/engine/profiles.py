"""Latency profiles: the times of a model on a device, and how many tokens its KV cache holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError, UnknownName
from controller.core.steps import Step
from controller.core.types import LatencyCoefficients
from controller.engine.process_spec import CONSTANT
from controller.predict.latency import LatencyModel

SHIPPED = Path(__file__).with_name("profiles.json")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
DEFAULT_CAPACITY_TOKENS = 262_144  # for profiles without one


@dataclass(frozen=True, slots=True)
class Profile:
    id: str
    model: str
    coefficients: LatencyCoefficients
    kv_capacity_tokens: int

    def seconds(self, step: Step) -> float:
        """Predicted time of a step with prefill chunks and decodes. Tokens before a chunk's start count as context."""
        tokens = squares = 0
        for chunk in step.chunks:
            tokens += chunk.length
            squares += chunk.length * (chunk.length + 2 * chunk.start)
        return LatencyModel(self.coefficients).step(tokens, squares, len(step.decodes), step.context_sum)


def load_profile(name: str) -> Profile:
    """The profile with this id or alias, `constant:5ms` (each step takes that long), or the path of a JSON file with
    one profile. Raises ConfigError."""
    match = CONSTANT.fullmatch(name)
    if match:
        return _constant(name, float(match["number"]) * UNITS[match["unit"]])
    if name.endswith(".json"):
        return _read(Path(name))
    shipped = shipped_profiles()
    if name not in shipped:
        raise UnknownName(
            f"unknown profile {name!r}; valid: {', '.join(sorted(shipped))}, constant:<number><us|ms|s>, a .json file",
            field="profile",
        )
    return shipped[name]


def shipped_profiles() -> dict[str, Profile]:
    """The shipped profiles, by id and by alias."""
    found = {}
    for raw in json.loads(SHIPPED.read_text())["profiles"]:
        profile = _parse(raw, "profiles.json")
        found.update(dict.fromkeys((raw["id"], *raw["aliases"]), profile))
    return found


def _constant(name: str, seconds: float) -> Profile:
    coefficients = LatencyCoefficients(seconds, 0.0, 0.0, seconds, 0.0, 0.0)
    return Profile(name, "constant", coefficients, DEFAULT_CAPACITY_TOKENS)


def _read(path: Path) -> Profile:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {path}: {error}", field="profile") from error
    return _parse(raw, str(path))


def _parse(raw: Any, where: str) -> Profile:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"profile {where}: expected an object", field="profile")
    coefficients = LatencyCoefficients(*_curve(raw, "prefill", where), *_curve(raw, "decode", where))
    capacity = raw.get("kv_capacity_tokens") or DEFAULT_CAPACITY_TOKENS
    if not isinstance(capacity, int) or capacity < 1:
        raise ConfigError(f"profile {where}: kv_capacity_tokens must be a positive integer", field="profile")
    model = str(raw.get("model", "custom"))
    return Profile(str(raw.get("id", where)), model, coefficients, capacity)


def _curve(raw: Mapping[str, Any], part: str, where: str) -> tuple[float, float, float]:
    curve = raw.get(part)
    values = tuple(curve.get(key) if isinstance(curve, Mapping) else None for key in "abc")
    if not all(isinstance(value, int | float) and value >= 0 for value in values):
        raise ConfigError(f"profile {where}: {part} needs numbers a, b, c of at least 0", field="profile")
    a, b, c = (float(value) for value in values if value is not None)
    return a, b, c
