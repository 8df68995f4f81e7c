"""What engines printed, for people: the end of it, readable in a browser."""

from __future__ import annotations

import re
from pathlib import Path

from controller.core.errors import ConfigError
from controller.scale.provisioning import abilities
from workers.provisioners.base import LogTail, sources

LOG_BYTES = 64 << 10
# Colours and cursor moves of a terminal, then what else is no text. Progress bars return to the start of their line.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def log_of(source: str, instance_id: str, data_dir: Path) -> LogTail | None:
    """What the engine of an instance printed. None: its provisioner shows no logs, or has none on this machine. Raises
    OSError if it cannot be read."""
    if not abilities(source).logs:
        return None
    found = sources(data_dir, only=source).get(source)
    try:
        return None if found is None else found.log(instance_id)
    except ConfigError:  # no engine can have this id
        return None


def tail_of(path: Path, most: int = LOG_BYTES) -> LogTail | None:
    """The last whole lines of a file, at most `most` bytes. None if it does not exist. Raises OSError."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            file.seek(max(0, size - most))
            raw = file.read(most)
            written_at = path.stat().st_mtime
    except FileNotFoundError:
        return None
    cut = size > most
    if cut:
        raw = raw.partition(b"\n")[2] or raw  # the first line is not whole
    return LogTail(plain(raw.decode(errors="replace")), cut, written_at)


def plain(text: str) -> str:
    """Without colours, overwritten lines and control characters."""
    return _CONTROL.sub("", _OVERWRITTEN.sub("", _ESCAPES.sub("", text).replace("\r\n", "\n")))
