"""Stores every run of a long benchmark as a line of JSON, so that an interrupted benchmark can continue."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar, cast

from benchmarks.load.scoring import Score

T = TypeVar("T")


class RunJournal:
    """Runs by name. `resume`: use the runs in the file; otherwise the first run starts a new file."""

    def __init__(self, path: Path | None, resume: bool = False, of: Callable[..., Any] = Score) -> None:
        """`of`: the dataclass of a measured run."""
        self._path = path
        self._known: dict[str, Any] = {}
        self._fresh = not resume
        if path is not None and resume and path.exists():
            with opened(path, "r") as file:
                for line in file:
                    entry = json.loads(line)
                    self._known[_key(entry["run"])] = of(**entry["score"])

    def __len__(self) -> int:
        return len(self._known)

    def once(self, run: dict[str, Any], measure: Callable[[], T]) -> T:
        """The score of this run, from the file or measured now."""
        known = self._known.get(_key(run))
        if known is not None:
            return cast(T, known)
        found = self._known[_key(run)] = measure()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with opened(self._path, "w" if self._fresh else "a") as file:
                file.write(json.dumps({"run": run, "score": asdict(cast(Any, found))}) + "\n")
            self._fresh = False
        return found


def opened(path: Path, mode: Literal["r", "w", "a"]) -> TextIO:
    """A file of runs, compressed if its name ends with `.gz`. Each run appended is a compressed part of its own, so the
    file is whole after every run."""
    return cast(TextIO, gzip.open(path, f"{mode}t", encoding="utf-8") if path.suffix == ".gz" else path.open(mode))


def _key(run: dict[str, Any]) -> str:
    return json.dumps(run, sort_keys=True)
