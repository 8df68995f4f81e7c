"""What the coordinator of pruning has decided and not yet written to the audit.

It lives in the process that coordinates, and Redis has a copy that is at most about a second old: when that process is
killed, the next one goes on with it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from controller.core.messages import PRUNING_UNTOLD_KEY
from controller.core.pruning import PruneReason, reasons_from_json, reasons_to_json
from controller.flow.coordinator import Coordinated
from workers.live import Dialogue

KEPT_S = 3600.0  # of the copy
NAMED = 20  # requests that a decision names


@dataclass(slots=True)
class Untold:
    """What was pruned since the last decision in the audit, and what became of it: `returned` to its place, or `left`
    the reports, since it was sent, ended, or cannot be in time any more. `since` is an epoch second. `seen_at`: when
    this process last coordinated, on its monotonic clock."""

    since: float = field(default_factory=time.time)
    in_force: Mapping[str, PruneReason] = field(default_factory=dict)
    pruned: dict[str, PruneReason] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    most_waiting: int = 0
    gateways: set[str] = field(default_factory=set)
    seen_at: float | None = None
    copied: bool = False  # Redis may have a copy

    @property
    def happened(self) -> bool:
        return bool(self.pruned or self.returned or self.left)

    def take(self, found: Coordinated, waiting: Collection[str] = ()) -> None:
        """`waiting`: requests that gateways report."""
        new = {name: reason for name, reason in found.scavengers.items() if name not in self.in_force}
        self.pruned |= new
        for name in self.in_force.keys() - found.scavengers.keys():
            (self.returned if name in waiting else self.left).add(name)
        self.in_force = found.scavengers
        self.most_waiting = max(self.most_waiting, found.waiting)
        self.gateways |= set(found.gateways)

    def figures(self, drop_budget: float) -> dict[str, object]:
        instances = Counter(reason.instance for reason in self.pruned.values())
        return {
            "pruned": len(self.pruned),
            "returned": len(self.returned),
            "left": len(self.left),
            "seconds": round(max(0.0, time.time() - self.since), 1),
            "most_waiting": self.most_waiting,
            "gateways": sorted(self.gateways),
            "drop_budget": drop_budget,
            "by_instance": dict(sorted(instances.items())),
            "longest_behind_s": round(max((each.behind_s for each in self.pruned.values()), default=0.0), 3),
            "requests": sorted(self.pruned)[:NAMED],
        }

    def empty(self) -> None:
        """All of it was told. What is in force stays."""
        self.since, self.most_waiting = time.time(), 0
        self.pruned.clear()
        self.returned.clear()
        self.left.clear()
        self.gateways.clear()

    def forget(self) -> None:
        """Another process coordinates, with the copy."""
        self.empty()
        self.in_force, self.copied = {}, False

    # ---- the copy in Redis ------------------------------------------------------------------------------------------

    def keep(self) -> Dialogue[None]:
        """Copy it to Redis, or remove the copy if there is nothing to tell and nothing in force."""
        if self.happened or self.in_force:
            yield ("SET", PRUNING_UNTOLD_KEY, orjson.dumps(self._to_json()), "PX", int(KEPT_S * 1000))
            self.copied = True
        elif self.copied:
            yield ("DEL", PRUNING_UNTOLD_KEY)
            self.copied = False

    def go_on(self) -> Dialogue[None]:
        """Take what the process that coordinated before had to tell, in place of what this one remembers."""
        value = yield ("GET", PRUNING_UNTOLD_KEY)
        self.forget()
        if value is None:
            return
        self.copied = True
        try:
            self._read(orjson.loads(value))
        except (AttributeError, KeyError, TypeError, ValueError):  # of another release
            self.empty()
            self.in_force = {}

    def _to_json(self) -> dict[str, Any]:
        return {
            "since": self.since,
            "in_force": reasons_to_json(self.in_force),
            "pruned": reasons_to_json(self.pruned),
            "returned": sorted(self.returned),
            "left": sorted(self.left),
            "most_waiting": self.most_waiting,
            "gateways": sorted(self.gateways),
        }

    def _read(self, raw: dict[str, Any]) -> None:
        """Raises AttributeError, KeyError, TypeError or ValueError for anything that `_to_json` does not write."""
        self.since, self.most_waiting = float(raw["since"]), int(raw["most_waiting"])
        self.in_force, self.pruned = reasons_from_json(raw["in_force"]), reasons_from_json(raw["pruned"])
        self.returned, self.left, self.gateways = (set(raw[name]) for name in ("returned", "left", "gateways"))
