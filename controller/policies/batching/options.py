"""Builds a batching policy from its name and options in JSON (an experiment file, an engine's command line)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from controller.core.errors import ConfigError
from controller.policies.batching.base import BATCHINGS, Batching


def build(name: str, options: Mapping[str, Any], where: str = "batching") -> Batching:
    """Build the policy. Raises UnknownName for `name`, and ConfigError for an option, with the field `where`.option."""
    policy: Any = BATCHINGS[name]
    config_type = getattr(policy, "Config", None)
    if config_type is None:
        raise ConfigError(f"batching {name!r} has no Config", field=where)
    built: Batching = policy(_configured(config_type, options, f"batching {name}", where))
    return built


def _configured(config: Any, options: Mapping[str, Any], whose: str, where: str) -> Any:
    known = {each.name for each in fields(config)}
    if unknown := sorted(set(options) - known):
        valid = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{whose} has no setting {unknown[0]!r}; valid: {valid}", field=f"{where}.{unknown[0]}")
    defaults = config()
    given = {}
    for name, value in options.items():
        default, field = getattr(defaults, name), f"{where}.{name}"
        if is_dataclass(default) and isinstance(value, Mapping):
            given[name] = _configured(type(default), value, f"{whose}.{name}", field)
        else:
            _require_kind(name, value, default, field)
            given[name] = value
    try:
        return config(**given)
    except ConfigError as error:
        named = error.field if error.field in known else next(iter(given), None)
        raise ConfigError(str(error), field=f"{where}.{named}" if named else where) from error


def _require_kind(name: str, value: object, default: object, field: str) -> None:
    """Raise ConfigError now for text where a number belongs; it would fail much later otherwise, in the middle of a
    step.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, int) or default is None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits, kind = whole or (default is None and value is None), "a whole number"
    elif isinstance(default, float):
        fits, kind = number and (isfinite(value) or value == default), "a number"  # type: ignore[arg-type]
    elif isinstance(default, str):
        fits, kind = isinstance(value, str), "text"
    elif is_dataclass(default):
        fits, kind = isinstance(value, type(default)), "an object"
    else:
        fits, kind = isinstance(value, Sequence) and not isinstance(value, str), "a list"
    if not fits:
        raise ConfigError(f"{name} must be {kind}, is {value!r}", field=field)
