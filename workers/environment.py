"""A variable of the environment, or the file that stands for it: the one rule of all processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from controller.core.errors import ConfigError


def given(environ: Mapping[str, str], name: str) -> str:
    """The value of NAME, "" where there is none. NAME_FILE, the path of a file that holds it (a mounted secret), comes
    first.

    Raises ConfigError that names NAME_FILE where its file cannot be read or is empty: what was meant to be secret would
    silently be something else.
    """
    path = environ.get(f"{name}_FILE")
    if not path:
        return environ.get(name, "")
    try:
        value = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}_FILE={path!r}: expected a readable text file ({error})", f"{name}_FILE") from None
    if not value:
        raise ConfigError(f"{name}_FILE={path!r}: expected a file with something in it", f"{name}_FILE")
    return value
