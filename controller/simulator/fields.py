"""Reads an experiment file. Every value is checked; an invalid one is refused with its field and the valid values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from controller.core.errors import ConfigError


class Fields:
    """One JSON object. Take the known fields, then `done()` refuses the others."""

    def __init__(self, raw: Any, where: str) -> None:
        self.where = where
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where or 'the file'} must be an object, not {_kind(raw)}", field=where)
        self._raw = dict(raw)
        self._known: list[str] = []

    def name(self, field: str) -> str:
        return f"{self.where}.{field}" if self.where else field

    def __contains__(self, field: str) -> bool:
        return field in self._raw

    def any(self, field: str, default: Any = None) -> Any:
        self._known.append(field)
        return self._raw.pop(field, default)

    def required(self, field: str) -> Any:
        if field not in self._raw:
            raise ConfigError(f"{self.name(field)} is missing", field=self.name(field))
        return self.any(field)

    def number(self, field: str, default: float | None = None, *, above: float = -math.inf) -> float:
        """A finite number greater than `above`; required if there is no default."""
        value = self.required(field) if default is None else self.any(field, default)
        return self.check_number(value, field, above)

    def optional_number(self, field: str, *, above: float = -math.inf) -> float | None:
        value = self.any(field)
        return None if value is None else self.check_number(value, field, above)

    def check_number(self, value: Any, field: str, above: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{self.name(field)} must be a number, not {value!r}", field=self.name(field))
        if not value > above:
            raise ConfigError(f"{self.name(field)} must be above {above:g}, got {value:g}", field=self.name(field))
        return float(value)

    def integer(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.required(field) if default is None else self.any(field, default)
        return self.check_integer(value, field, least)

    def optional_integer(self, field: str, *, least: int = 1) -> int | None:
        value = self.any(field)
        return None if value is None else self.check_integer(value, field, least)

    def check_integer(self, value: Any, field: str, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.name(field)} must be an integer, not {value!r}", field=self.name(field))
        if value < least:
            raise ConfigError(f"{self.name(field)} must be at least {least}, got {value}", field=self.name(field))
        return value

    def flag(self, field: str, default: bool) -> bool:
        value = self.any(field, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.name(field)} must be true or false, not {value!r}", field=self.name(field))
        return value

    def text(self, field: str, default: str | None = None, *, valid: Sequence[str] = ()) -> str:
        value = self.required(field) if default is None else self.any(field, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.name(field)} must be text, not {_kind(value)}", field=self.name(field))
        if valid and value not in valid:
            raise ConfigError(
                f"{self.name(field)}: unknown {value!r}; valid: {', '.join(valid)}", field=self.name(field)
            )
        return value

    def list(self, field: str, default: Sequence[Any] | None = None) -> Sequence[Any]:
        value = self.required(field) if default is None else self.any(field, default)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{self.name(field)} must be a list, not {_kind(value)}", field=self.name(field))
        return value

    def object(self, field: str) -> Fields:
        return Fields(self.any(field, {}), self.name(field))

    def done(self) -> None:
        if self._raw:
            unknown = min(self._raw)
            valid = ", ".join(sorted(set(self._known)))
            raise ConfigError(f"unknown field {self.name(unknown)!r}; valid: {valid}", field=self.name(unknown))


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
