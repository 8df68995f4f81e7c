"""KV that prefill instances still keep and nobody needs: asked to be freed until they say so, then left to their lease.

A release outlives its transfer (the answer may be over before the prefill engine has heard of it), so it is not a state
of the transfer alone. All have the same time-out and are asked in the order of their clock: the first is due first.
"""

from __future__ import annotations

import math

from controller.core import events as ev

Kept = tuple[str, str]  # request, prefill instance


class KvReleases:
    """`timeout_s`: until an answer is missed; `tries`: how often the same is asked."""

    def __init__(self, timeout_s: float, tries: int) -> None:
        self._timeout_s = timeout_s
        self._tries = tries
        self._asked: dict[Kept, tuple[float, int]] = {}  # since when, for the how manieth time

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, request_id: str, instance_id: str, now: float, actions: list[ev.Action]) -> None:
        """Once, however often it is wanted."""
        if (request_id, instance_id) not in self._asked:
            self._asked[request_id, instance_id] = (now, 1)
            actions.append(ev.FreeKv(request_id, instance_id))

    def over(self, request_id: str, instance_id: str) -> None:
        """It is freed, or wanted again: the same request is prefilled there once more."""
        self._asked.pop((request_id, instance_id), None)

    def gone(self, instance_id: str) -> None:
        """With all that it kept."""
        self._asked = {kept: asked for kept, asked in self._asked.items() if kept[1] != instance_id}

    def overdue(self, now: float, actions: list[ev.Action]) -> None:
        while self._asked and self.next_at() <= now:
            kept, (_, tries) = next(iter(self._asked.items()))
            del self._asked[kept]
            if tries < self._tries:
                self._asked[kept] = (now, tries + 1)  # behind all others
                actions.append(ev.FreeKv(*kept))
            else:
                actions.append(ev.LeftToLease(*kept, tries))

    def next_at(self) -> float:
        """When the next answer is missed; infinite when none is expected."""
        since = next(iter(self._asked.values()), (math.inf, 0))[0]
        return since + self._timeout_s
