"""What engines report of their links, told to the migrator when it is news."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from controller.core.events import LinkSeen
from controller.core.kv_links import LinkReport

NEWS = 0.2  # a bandwidth that changed by less than this share is none


class LinkWatch:
    """`tell`: for the migrator. Reports of engines that nobody named (no order was given yet) are of no use to it."""

    def __init__(self, tell: Callable[[LinkSeen], None]) -> None:
        self._tell = tell
        self._told: dict[tuple[str, str], LinkSeen] = {}
        self._there: set[str] = set()

    def reported(self, instance_id: str, reports: Sequence[LinkReport]) -> None:
        """By the engine that pulls over them. Of one that is not there any more it is no news what others say."""
        for report in reports:
            if not report.peer or (self._there and report.peer not in self._there):
                continue
            seen = LinkSeen(report.peer, instance_id, report.state, report.bandwidth_bytes_s, report.latency_s)
            before = self._told.get((seen.source, seen.target))
            if before is None or _news(before, seen):
                self._told[seen.source, seen.target] = seen
                self._tell(seen)

    def keep(self, instance_ids: Sequence[str]) -> None:
        """Those that are there now. Who hears that an instance has gone forgets its links: they are news again."""
        there = set(instance_ids)
        left, self._there = self._there - there, there
        self._told = {pair: seen for pair, seen in self._told.items() if left.isdisjoint(pair)}


def _news(before: LinkSeen, after: LinkSeen) -> bool:
    if before.state is not after.state:
        return True
    old, new = before.bandwidth_bytes_s, after.bandwidth_bytes_s
    return (old is None) != (new is None) or (old and new and not math.isclose(old, new, rel_tol=NEWS)) or False
