"""Stores every run of a long benchmark as a line of JSON, so that an interrupted benchmark can continue."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

from benchmarks.scoring import Score

T = TypeVar("T")


class RunJournal:
    """Runs by name. `resume`: use the runs in the file; otherwise the first run starts a new file."""

    def __init__(self, path: Path | None, resume: bool = False, of: Callable[..., Any] = Score) -> None:
        """`of`: the dataclass of a measured run."""
        self._path = path
        self._known: dict[str, Any] = {}
        self._fresh = not resume
        if path is not None and resume and path.exists():
            for line in path.read_text().splitlines():
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
            with self._path.open("w" if self._fresh else "a") as file:
                file.write(json.dumps({"run": run, "score": asdict(cast(Any, found))}) + "\n")
            self._fresh = False
        return found


def _key(run: dict[str, Any]) -> str:
    return json.dumps(run, sort_keys=True)
