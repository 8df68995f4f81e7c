"""The policies and loads that `bench-vllm` compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.load.workloads import MIXES, PlannedArrival, Task, burst, sustained

Kind = Literal["burst", "sustained"]
DirectPriority = Literal["none", "class"]


@dataclass(frozen=True, slots=True)
class VllmContender:
    """A policy set and its name in the report. `windows`: values of its fixed window to sweep; empty: it has none."""

    name: str
    policy_set: str
    windows: Sequence[int] = ()

    @property
    def direct(self) -> bool:
        """Whether the client sends to the engines itself, and no process of ours runs."""
        return self.name in DIRECT

    def overrides(self, window: int | None) -> dict[str, Any]:
        return {} if window is None else {"pacing": {"window": window}}


WINDOWS = (8, 12, 20, 28, 40, 56, 80)  # outstanding requests on an engine
# Without Slackline: the client alternates between the engines, and PostgreSQL and Redis are stopped as well. Priorities
# are vLLM's own, by class, the tightest TTFT first.
DIRECT: Mapping[str, DirectPriority] = {"direct_round_robin": "none", "direct_priority_class": "class"}
CONTENDERS = (
    VllmContender("direct_round_robin", "direct_round_robin"),
    VllmContender("direct_priority_class", "direct_priority_class"),
    VllmContender("round_robin", "round_robin"),
    VllmContender("least_outstanding", "least_outstanding"),
    VllmContender("edf_best", "edf_window", WINDOWS),
    VllmContender("engine_priority_class", "engine_priority_class"),
    VllmContender("engine_priority_deadline", "engine_priority_deadline"),
    VllmContender("tpot_arrival_best", "tpot_arrival_window", WINDOWS),
    VllmContender("slackline", "slackline"),
)
# What QUICK leaves out was never the best baseline on two engines.
QUICK_CONTENDERS = tuple(
    contender
    for contender in CONTENDERS
    if contender.name not in ("round_robin", "least_outstanding", "engine_priority_deadline")
)
BASELINES = tuple(contender.name for contender in CONTENDERS if contender.name != "slackline")
# Start of a sweep, and the only value without one (QUICK): the best of earlier sweeps, by kind of load.
USUAL_WINDOWS: Mapping[tuple[str, Kind], int] = {
    ("edf_best", "burst"): 28,
    ("edf_best", "sustained"): 28,
    ("tpot_arrival_best", "burst"): 28,
    ("tpot_arrival_best", "sustained"): 20,
}


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """One load: a mix at `times` its knee, the rate at which round robin without Slackline first drops below 0.9."""

    mix: str
    kind: Kind
    times: float
    per_task: int = 300
    duration_s: float = 90.0

    @property
    def name(self) -> str:
        return f"{self.mix} {self.kind} {self.times:g}x"

    @property
    def tasks(self) -> Sequence[Task]:
        return MIXES[self.mix]

    def arrivals(self, rate: float, seed: int) -> list[PlannedArrival]:
        if self.kind == "burst":
            return burst(self.tasks, rate, seed, self.per_task)
        return sustained(self.tasks, rate, seed, self.duration_s)


LOADS = (
    PlannedLoad("4-task", "burst", 1.0),
    PlannedLoad("4-task", "burst", 1.7),
    PlannedLoad("4-task", "burst", 2.3),
    PlannedLoad("4-task", "sustained", 1.2),
    PlannedLoad("4-task", "sustained", 1.7),
    PlannedLoad("2-task", "burst", 1.3),
)
QUICK_LOADS = (LOADS[1], LOADS[4])
