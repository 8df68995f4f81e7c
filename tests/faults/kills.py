"""`kill -9` of worker and beat until decisions lie between the kills, and what the engines' processes did meanwhile."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.faults.system import System

JOBS = ("worker", "beat")
LOOK_S = 0.02
BACK_WITHIN_S = 60.0


@dataclass(slots=True)
class Kills:
    """Each entry of `times` is when worker and beat were killed together, in epoch seconds."""

    system: System
    after: int  # decisions up to this id are older
    times: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)

    def kill(self) -> None:
        killed = {name: self.system.kill(name) for name in JOBS}
        self.times.append(time.time())
        back = lambda: all(self.system.pid(name) not in (None, pid) for name, pid in killed.items())  # noqa: E731
        self.back_s.append(self.system.until(back, BACK_WITHIN_S))

    def blindly(self, rounds: int, seed: int = 3) -> None:
        """At any moment: also before a decision is committed."""
        moments = random.Random(seed)
        for _ in range(rounds):
            time.sleep(moments.uniform(0.5, 2.5))
            self.kill()

    def at_each(self, kind: str, count: int, within_s: float) -> None:
        """As soon as a decision of this kind can be seen, before its worker can do much about it."""
        deadline = time.monotonic() + within_s
        seen = len(self.decided(kind))
        while count and time.monotonic() < deadline:
            if len(self.decided(kind)) > seen:
                self.kill()
                count, seen = count - 1, len(self.decided(kind))
            time.sleep(LOOK_S)

    def decided(self, kind: str) -> list[dict[str, Any]]:
        """In their order: `id`, `at` (epoch seconds), `inputs`, `outcome`."""
        sql = "SELECT id, extract(epoch FROM at), inputs, outcome FROM decision WHERE id > %s AND kind = %s ORDER BY id"
        rows = self.system.query(sql, self.after, kind)
        return [{"id": id, "at": float(at), "inputs": inputs, "outcome": outcome} for id, at, inputs, outcome in rows]

    def gaps_s(self, kind: str) -> list[float]:
        """From each decision that has a kill before it and one after it to the one after it."""
        between = [each["at"] for each in self.decided(kind) if self.times and self.times[0] < each["at"]]
        later = [min((kill - at for kill in self.times if kill > at), default=None) for at in between]
        return [gap for gap in later if gap is not None]


class Processes:
    """`with Processes(system) as seen:` notes which pids each engine had. Its ids are the instances'."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.pids: dict[str, set[int]] = defaultdict(set)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="processes")

    def __enter__(self) -> Processes:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        ledger = self.system.folder / "processes.json"
        while not self._end.wait(0.05):
            for row in json.loads(ledger.read_text()):
                if row["name"].startswith("engine "):
                    self.pids[row["name"].removeprefix("engine ")].add(row["pid"])
