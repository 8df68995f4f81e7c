"""The key that an engine asks for in `Authorization: Bearer`, as vLLM and SGLang do with `--api-key`.

An instance names its key and the database has no more than that name. The key itself is in a file of that name in
ENGINE_KEYS_DIR, one line with the URL that it is for and the key. It is sent to no other address: otherwise whoever may
register an instance could have any key sent to a program of his own. A file that changes is read again, so a key is
rotated without a restart.

Engines that Slackline starts have a key derived from the fleet's token and their id (MADE), which nobody stores.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import requests

from controller.core.types import KEY_MADE
from workers.environment import read_variable
from workers.http.fleet_proof import authority, fleet_token, made_key

DIR = "ENGINE_KEYS_DIR"
CHECKED_S = 1.0  # how often a file is looked at
LARGEST = 4096  # bytes of a file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEY = re.compile(r"[!-~]{1,512}")  # visible ASCII: it becomes a line of a header


class NoEngineKey(requests.RequestException):
    """There is no key to send, or it is for another address. Nothing was sent. The message never has the key."""


@dataclass(frozen=True, slots=True)
class EngineKey:
    """The key of one instance. `name`: of its file, KEY_MADE, or "" for an engine that asks for none. `token`: the
    fleet's, if not that of this process's environment."""

    name: str = ""
    instance: str = ""
    url: str = ""
    token: str | None = field(default=None, repr=False)

    def value(self) -> str:
        """Raises NoEngineKey."""
        if not self.name:
            return ""
        if self.name == KEY_MADE:
            return made_key(fleet_token() if self.token is None else self.token, self.instance)
        address, value = _stored(self.name)
        if address != authority(self.url):
            raise NoEngineKey(f"the key {self.name} is for {address}, not for {authority(self.url)}")
        return value

    def headers(self) -> dict[str, str]:
        """Raises NoEngineKey."""
        value = self.value()
        return {"Authorization": f"Bearer {value}"} if value else {}


NO_KEY = EngineKey()


@dataclass(slots=True)
class _Entry:
    looked_at: float
    mark: tuple[int, int, int]
    found: tuple[str, str] | str  # address and key, or why there is none


_ENTRIES: dict[Path, _Entry] = {}


def folder(environ: Mapping[str, str] | None = None) -> Path:
    values = os.environ if environ is None else environ
    return Path(read_variable(values, DIR) or Path(read_variable(values, "DATA_DIR") or ".data", "engine-keys"))


def _stored(name: str) -> tuple[str, str]:
    """Address and key in the file. Raises NoEngineKey."""
    if not _NAME.fullmatch(name):
        raise NoEngineKey(f"{name!r} is no name of a key")
    path, now = folder() / name, time.monotonic()
    entry = _ENTRIES.get(path)
    if entry is None or now - entry.looked_at >= CHECKED_S:
        mark = _mark(path)
        if entry is None or entry.mark != mark:
            entry = _ENTRIES[path] = _Entry(now, mark, _read(path, name))
        entry.looked_at = now
    if isinstance(entry.found, str):
        raise NoEngineKey(entry.found)
    return entry.found


def _mark(path: Path) -> tuple[int, int, int]:
    try:
        known = path.stat()
    except OSError:
        return (0, 0, 0)
    return (known.st_mtime_ns, known.st_size, known.st_ino)


def _read(path: Path, name: str) -> tuple[str, str] | str:
    try:
        with path.open("rb") as file:
            words = file.read(LARGEST).decode("ascii").split()
    except OSError as error:
        return f"the key {name} cannot be read in {DIR}: {error.strerror}"
    except UnicodeDecodeError:
        words = []
    if len(words) != 2 or not words[0].startswith(("http://", "https://")) or not _KEY.fullmatch(words[1]):
        return f"the key {name} in {DIR} must be one line: the URL that it is for, a space, and the key"
    try:
        return authority(words[0]), words[1]
    except ValueError:
        return f"the key {name} in {DIR} has no valid URL"
