"""Requests that name only a priority: their targets come from the mapping that serves (HyperFlexis sec. 5.2, Alg. 2).

The same `PriorityMapping` as in the gateway, told the same things: what each finished request measured, and whether a
higher priority is pending when a new one asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from controller.core.snapshot import LevelBounds, MappingConfig
from controller.core.types import Targets
from controller.simulator.report.results import SimRecord
from controller.simulator.workloads.demand import Demand
from controller.slo.mapping import PriorityMapping


class MappedTargets:
    """Targets by priority over one run. What a request's own targets say is left out of it, its patience is not."""

    def __init__(self, config: MappingConfig) -> None:
        self._mapping = PriorityMapping(config)

    def assign(self, demand: Demand, pending_above: Callable[[int], bool], now: float) -> tuple[Targets, int]:
        """Targets and level of a request that arrives now."""
        level = self._mapping.level(demand.priority)
        given = self._mapping.assign(level, pending_above(level), now)
        return Targets(given.ttft_s, given.tpot_s, None, demand.targets.waiting_time_s), level

    def ended(self, level: int, record: SimRecord, now: float) -> None:
        """A request was answered: what it measured, and how long it queued."""
        self._mapping.observe(level, record.ttft_s, record.tpot_s, record.queue_s or 0.0, now)


def around(
    targets: Sequence[tuple[float, float]], spread: float = 0.25, *, window: int = 1000, window_age_s: float = 300.0
) -> MappingConfig:
    """A mapping with one level for each (TTFT, TPOT), most urgent first, each within +- `spread` of it (sec. 7.3)."""
    levels = tuple(
        LevelBounds(ttft, tpot, *(bound * x for x in (ttft, tpot) for bound in (1 - spread, 1 + spread)))
        for ttft, tpot in targets
    )
    return MappingConfig(None, levels, window, window_age_s)
