"""The warm pool: how many warm spares a policy keeps, instances whose process is up and whose weights are absent.

HyperFlexis (sec. 6, Fast Scaling) keeps one on every free device. So does a policy that names no number, as far as its
free devices are known and it may serve with them (`target_size`). A policy that names a number keeps that many, since
each costs as much as an instance that serves. Which spare a scale-out takes is part of the capacity plan
(`controller.scale.capacity_plan`). The pool is refilled at a later look, never at the one that took from it, because
starting a process must not compete with the weight load that requests wait for. Cost: O(instances log instances).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple


class SpareSource(IntEnum):
    """Where a spare's weights come from; the lower the value, the nearer they are."""

    HOST_COPY = 0  # kept in the host's memory by sleep level 1
    ENGINE = 1  # the memory of another engine
    DISK = 2


class Spare(NamedTuple):
    """An instance that has a process but no weights: a warm spare (`sleep_level` 0) or a sleeper (1 or 2).

    `ready`: its process answers, so it can be told to load weights or to wake up. `since`: when it was last wanted, on
    any clock, used to order spares. `fixed`: somebody else runs it, so it can be used but not stopped. `needed`: it
    keeps the targets of some recent request that no instance keeps which serves.
    """

    id: str
    ready: bool
    since: float
    fixed: bool = False
    source: int = SpareSource.HOST_COPY
    sleep_level: int = 0
    needed: bool = False


class PoolChange(NamedTuple):
    """Start this many warm spares, and stop the spares with these ids."""

    start: int
    stop: tuple[str, ...]


def weight_source(*, sleep_level: int, copies: bool, engine_ready: bool) -> SpareSource:
    """The nearest source for a spare. `copies`: its engine can load from another engine's memory; `engine_ready`: an
    engine of the stage has whole weights to give."""
    if sleep_level == 1:
        return SpareSource.HOST_COPY
    return SpareSource.ENGINE if copies and engine_ready else SpareSource.DISK


def share(policy: int, pools: Mapping[int, int], instances: int) -> int:
    """How many of `instances` warm spares `policy` (its id) may keep beside the other policies on the same devices.

    `pools`: how many spares each of the sharing policies keeps now. `instances`: how many spares there can be at once,
    all of theirs and as many as the free devices allow. Everybody gets an equal part. The remainder goes first to
    policies that already have more than an equal part, in order of their ids, so that no spare is stopped in order to
    start its like; then to the others. The parts add up to `instances` whichever policy asks, before or after the
    others have started or stopped something.
    """
    each, rest = divmod(instances, len(pools))
    order = sorted(pools, key=lambda id: (pools[id] <= each, id))
    return each + (order.index(policy) < rest)


def target_size(pool: int, *, room: int | None, share: int, headroom: int) -> int:
    """How many spares a policy keeps that names no number: its `share`, as long as all of them could serve.

    `pool`: spares it has now. `room`: how many more instances the free devices allow now; a device that another policy
    is about to free does not count yet. None: the devices are unknown, and an unknown machine is not filled with
    processes (0). `headroom`: `max_instances` less the instances that serve, start or sleep.
    """
    if room is None:
        return 0
    return max(0, min(share, pool + room, headroom))


def refill(pool: Sequence[Spare], target: int, *, room: int | None, busy: bool) -> PoolChange:
    """The change that brings the pool to `target`. `room`: how many processes can be started now (None: any number);
    `busy`: a weight load is under way, so nothing is started.

    Where there are too many, those whose process still starts go first, then the youngest.
    """
    if len(pool) < target:
        missing = target - len(pool)
        return PoolChange(0 if busy else missing if room is None else min(missing, room), ())
    ours = sorted((each for each in pool if not each.fixed), key=lambda each: (each.ready, -each.since, each.id))
    return PoolChange(0, tuple(each.id for each in ours[: len(pool) - target]))
