"""Typed reading of environment variables that refuses nonsense. Used by console/settings.py alone."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

from controller.core.errors import ConfigError
from controller.postgres.params import libpq_options
from workers.environment import read_variable

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def embedded_ports(data_dir: Path) -> dict[str, int]:
    """Where the servers of `make up` listen that were started last with this folder; empty where there are none."""
    try:
        said = json.loads((data_dir / "ports.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: port for name, port in said.items() if isinstance(port, int)} if isinstance(said, dict) else {}


class Environment:
    """Each reader names the variable in its error. An empty value counts as not set.

    Any may come from a file instead: NAME_FILE holds the path (`workers.environment`).
    """

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = os.environ if values is None else values

    def text(self, name: str, default: str) -> str:
        try:
            return read_variable(self._values, name) or default
        except ConfigError as error:
            raise ImproperlyConfigured(str(error)) from None

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.text(name, default)
        if value not in choices:
            raise ImproperlyConfigured(f"{name}={value!r}: expected one of {', '.join(choices)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.text(name, str(default)).lower()
        if value not in _TRUE | _FALSE:
            raise ImproperlyConfigured(f"{name}={value!r}: expected 1 or 0")
        return value in _TRUE

    def number(self, name: str, default: float, low: float, high: float) -> float:
        raw = self.text(name, str(default))
        try:
            value = float(raw)
        except ValueError:
            raise ImproperlyConfigured(f"{name}={raw!r}: expected a number from {low:g} to {high:g}") from None
        if not low <= value <= high:
            raise ImproperlyConfigured(f"{name}={raw!r}: expected {low:g} to {high:g}")
        return value

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        value = self.number(name, default, low, high)
        if value != int(value):
            raise ImproperlyConfigured(f"{name}={value!r}: expected a whole number from {low} to {high}")
        return int(value)

    def names(self, name: str, default: str = "") -> list[str]:
        return [part.strip() for part in self.text(name, default).split(",") if part.strip()]

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object; empty when not set."""
        raw = self.text(name, "{}")
        try:
            value = json.loads(raw)
        except ValueError as error:
            raise ImproperlyConfigured(f"{name}: not JSON ({error}); expected a JSON object") from None
        if not isinstance(value, dict):
            raise ImproperlyConfigured(f"{name}: expected a JSON object")
        return value

    def url(self, name: str, default: str, schemes: tuple[str, ...]) -> str:
        """The value is not repeated in errors where it may hold a password, nor what the parser says of its parts."""
        value = self.text(name, default)
        expected = f"expected {' or '.join(schemes)}://host..."
        shown = name if "@" in value or "://:" in value else f"{name}={value!r}"
        try:
            parts = urlsplit(value)
            parts.port  # noqa: B018 (raises for what is none)
        except ValueError:
            raise ImproperlyConfigured(f"{shown}: not a URL, or its port is no number; {expected}") from None
        if parts.scheme not in schemes or not parts.hostname:
            raise ImproperlyConfigured(f"{shown}: {expected}")
        return value.rstrip("/")

    def database(self, name: str, default: str) -> dict[str, Any]:
        """NAME, USER, PASSWORD, HOST, PORT and OPTIONS of a postgresql:// URL."""
        value = self.url(name, default, ("postgresql", "postgres"))
        parts = urlsplit(value)
        if not parts.path.strip("/"):
            raise ImproperlyConfigured(f"{name}: names no database (postgresql://user@host:5432/database)")
        options = dict(parse_qsl(parts.query))
        if strange := sorted(options.keys() - libpq_options()):
            raise ImproperlyConfigured(f"{name}: no connection option of PostgreSQL: {', '.join(strange)}")
        return {
            "NAME": unquote(parts.path.strip("/")),
            "USER": unquote(parts.username or "postgres"),
            "PASSWORD": unquote(parts.password or ""),
            "HOST": parts.hostname or "",
            "PORT": parts.port or 5432,
            "OPTIONS": options,
        }

    def secret(self, name: str, kept_in: Path) -> str:
        """The variable, else what `kept_in` holds, else a new one that is written there (mode 0600)."""
        given = self.text(name, "")
        if given:
            if len(given) < 32:
                raise ImproperlyConfigured(f"{name}: shorter than 32 characters; expected 32 or more")
            return given
        try:
            kept_in.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        except OSError as error:
            raise ImproperlyConfigured(f"DATA_DIR: cannot keep {name} there ({error}); expected a folder") from None
        try:
            descriptor = os.open(kept_in, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            kept = kept_in.read_text(encoding="utf-8").strip()
            if len(kept) < 32:
                raise ImproperlyConfigured(f"{kept_in}: shorter than 32 characters; remove it") from None
            return kept
        except OSError as error:
            raise ImproperlyConfigured(f"DATA_DIR: cannot keep {name} there ({error}); expected a folder") from None
        created = secrets.token_urlsafe(48)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(created)
        return created
