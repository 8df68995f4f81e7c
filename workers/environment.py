"""Reads environment variables, for all processes. `NAME_FILE` may name a file that holds the value of `NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from controller.core.errors import ConfigError


def read_variable(environ: Mapping[str, str], name: str) -> str:
    """The value of NAME; "" if it is not set. NAME_FILE, the path of a file such as a mounted secret, takes precedence.

    Raises ConfigError naming NAME_FILE if its file is empty or cannot be read; a default must not replace a secret
    unnoticed.
    """
    path = environ.get(f"{name}_FILE")
    if not path:
        return environ.get(name, "")
    try:
        value = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}_FILE={path!r}: expected a readable text file ({error})", f"{name}_FILE") from None
    if not value:
        raise ConfigError(f"{name}_FILE={path!r}: expected a file that is not empty", f"{name}_FILE")
    return value
