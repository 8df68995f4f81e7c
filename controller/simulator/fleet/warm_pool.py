"""The warm pool of a simulated fleet: the rules that run in production (controller/scale/warm_pool.py) on virtual time.

A warm instance's process is up, its weights are absent. It costs what a serving one costs, takes no requests and counts
as no capacity. A scale-out takes one and has only the weights to wait for; without one it waits for a process first.
Engines take any role, so one pool serves all stages. The pool is full when a run begins, as the instances are up.
"""

from __future__ import annotations

from controller.core.types import Role
from controller.scale.capacity_plan import nearest_spares
from controller.scale.warm_pool import Spare, refill
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.report.results import ScaledOut


class WarmPool:
    """`wanted` instances beside those that serve; a process is up `start_s` after it was asked for."""

    def __init__(self, wanted: int, start_s: float, cluster: Cluster) -> None:
        self._wanted, self._start_s = wanted, start_s
        self._cluster = cluster

    def fill_at_start(self) -> None:
        for _ in range(self._wanted):
            self._cluster.keep_warm(0.0, ready_at=0.0)

    def look(self, now: float) -> None:
        """Fill up; not while weights are on their way."""
        change = refill(self._members(now), self._wanted, room=None, busy=bool(self._cluster.starting))
        for _ in range(change.start):
            self._cluster.keep_warm(now, ready_at=now + self._start_s)
        for name in change.stop:
            self._cluster.give_up(name, now)

    def one_more(self, role: Role, now: float, load_s: float) -> ScaledOut:
        """An instance of the role is on its way: a warm one if one is ready, else from nothing."""
        taken = [spare.id for spare in nearest_spares(self._members(now), 1)]
        if taken:
            self._cluster.load(taken[0], role)
            return ScaledOut(taken[0], now, now + load_s, warm=True)
        name = self._cluster.ask_for_one_more(now, role)
        return ScaledOut(name, now, now + self._start_s + load_s, warm=False)

    def _members(self, now: float) -> list[Spare]:
        return [Spare(name, ready=each.ready_at <= now, since=each.since) for name, each in self._cluster.warm.items()]
