"""Log files in DATA_DIR/logs, one for each process, rotated when they grow too large."""

from __future__ import annotations

import shutil
from pathlib import Path

LIMIT_BYTES = 10 * 1024 * 1024


def rotate(folder: Path, limit: int = LIMIT_BYTES) -> list[str]:
    """Copy each large log to `<name>.1` and empty it. The writer needs no reopening, since it appends."""
    rotated = []
    for log in folder.glob("*.log"):
        if log.stat().st_size > limit:
            shutil.copyfile(log, log.with_name(log.name + ".1"))
            with log.open("r+b") as file:
                file.truncate(0)
            rotated.append(log.name)
    return rotated


def tail(log: Path, lines: int = 12) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        text = file.read().decode(errors="replace")
    return "\n".join(text.rstrip().splitlines()[-lines:])
