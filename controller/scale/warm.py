"""The warm pool: instances whose process is up and whose weights are absent (HyperFlexis sec. 6, Fast Scaling).

The paper keeps as many as there are devices. So does a policy that says nothing, as far as its free devices are known
and it may serve with them (`wanted`); one that says how many keeps those, since each costs what a serving one costs. A
scale-out takes one and gives it weights; the pool is filled up again at a later look, not the one that took from it:
the newcomer's start must not contend with the load that somebody waits for. Cost: O(instances log instances).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class WarmInstance(NamedTuple):
    """`ready`: its process answers, so that weights can be sent to it. `since`: when it was wished (any clock).

    `source`: how far its weights have to come: 0 from its host's own memory, 1 from another engine's, 2 from the disk.
    """

    id: str
    ready: bool
    since: float
    fixed: bool = False  # somebody else's: taken, but not stopped
    source: int = 0


class PoolChange(NamedTuple):
    """Start so many more, stop these."""

    start: int
    stop: tuple[str, ...]


def take(pool: Iterable[WarmInstance], instances: int) -> list[str]:
    """Ids of at most so many that are ready: those whose weights are nearest, then the longest ready first.

    Instances that sleep stand beside the pool here: they are woken before anything is started.
    """
    ready = sorted((each for each in pool if each.ready), key=lambda each: (each.source, each.since, each.id))
    return [each.id for each in ready[:instances]]


def wanted(pool: int, *, room: int | None, sharers: int, headroom: int) -> int:
    """How many a policy keeps that does not say: those it has and its part of the free devices, as long as all of them
    could serve. 0 where nobody knows the devices: an unknown machine is not filled with processes.

    `room`: more instances that the free devices allow (None: unknown); `sharers`: policies that would have a part of
    them, at least 1; `headroom`: most instances the policy may have, less those that serve, start or sleep.
    """
    if room is None:
        return 0
    return max(0, min(pool + room // sharers, headroom))


def fill(pool: Sequence[WarmInstance], wanted: int, *, startable: bool, busy: bool) -> PoolChange:
    """What brings the pool to `wanted`. `busy`: weights are being loaded, nothing is started meanwhile.

    Too many: those that still start go first, then the youngest.
    """
    if len(pool) < wanted:
        return PoolChange(wanted - len(pool) if startable and not busy else 0, ())
    ours = sorted((each for each in pool if not each.fixed), key=lambda each: (each.ready, -each.since, each.id))
    return PoolChange(0, tuple(each.id for each in ours[: len(pool) - wanted]))
