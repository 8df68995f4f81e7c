"""The warm pool: instances whose process is up and whose weights are absent (HyperFlexis sec. 6, Fast Scaling).

The paper keeps as many as there are devices. So does a policy that says nothing, as far as its free devices are known
and it may serve with them (`wanted`); one that says how many keeps those, since each costs what a serving one costs. A
scale-out takes one and gives it weights; the pool is filled up again at a later look, not the one that took from it:
the newcomer's start must not contend with the load that somebody waits for. Cost: O(instances log instances).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def share(policy: int, pools: Mapping[int, int], instances: int) -> int:
    """The part of `policy` (its id) of as many warm instances as there can be, beside the other policies' parts.

    `pools`: how many each of the policies that share keeps warm now; `instances`: that many of any of them could be
    warm at once, so all of theirs and as many as the free devices allow. What equal parts leave over goes to those that
    have more than that already, in order of their ids, so that nothing is stopped to start its like; then to the
    others. Whoever asks, and before or after the others started or stopped something, the parts make up all instances.
    """
    each, rest = divmod(instances, len(pools))
    order = sorted(pools, key=lambda id: (pools[id] <= each, id))
    return each + (order.index(policy) < rest)


def wanted(pool: int, *, room: int | None, share: int, headroom: int) -> int:
    """How many a policy keeps that does not say: its share, as long as all of them could serve and there is room now:
    a device that another policy is about to give is not there yet. 0 where nobody knows the devices: an unknown machine
    is not filled with processes.

    `room`: more instances that the free devices allow (None: unknown); `headroom`: most instances the policy may have,
    less those that serve, start or sleep.
    """
    if room is None:
        return 0
    return max(0, min(share, pool + room, headroom))


def fill(pool: Sequence[WarmInstance], wanted: int, *, startable: bool, busy: bool) -> PoolChange:
    """What brings the pool to `wanted`. `busy`: weights are being loaded, nothing is started meanwhile.

    Too many: those that still start go first, then the youngest.
    """
    if len(pool) < wanted:
        return PoolChange(wanted - len(pool) if startable and not busy else 0, ())
    ours = sorted((each for each in pool if not each.fixed), key=lambda each: (each.ready, -each.since, each.id))
    return PoolChange(0, tuple(each.id for each in ours[: len(pool) - wanted]))
