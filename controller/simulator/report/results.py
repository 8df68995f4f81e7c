"""The result of a run: plain records and samples. The caller decides where to write them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.core.decisions import Decision
from controller.core.types import Outcome, Targets


@dataclass(slots=True)
class SimRecord:
    """One request and how it ended: the fields of core.types.RequestRecord that a simulation knows.

    `at`: seconds after the start; durations are seconds after `at`. `token_times`: of every token, if kept. With
    disaggregation `instance` is the one that decoded, and `kv_transfer_s` the time from the end of its prefill
    until its KV was there, which is when the client had its first token.
    """

    id: str
    at: float
    tenant: str
    slo_class: str
    instance: str
    outcome: Outcome
    reason: str
    prompt_tokens: int
    output_tokens: int
    targets: Targets
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    ttft_met: bool
    tpot_met: bool
    deadline_met: bool
    attained: bool
    goodput_tokens: int
    attempts: int
    preemptions: int
    cached_tokens: int
    prefill_instance: str = ""
    kv_transfer_s: float | None = None
    token_times: array[float] | None = None


class FleetSample(NamedTuple):
    """How many requests are in each state at one moment."""

    at: float
    queued: int  # queued in the dispatcher
    waiting: int  # in engines, before the first token
    running: int
    instances: int
    moving: int = 0  # between the first token and a decode instance that has their KV


class InstanceUse(NamedTuple):
    """`provisioned_s`: from its start to the end of the run or the instance. `busy_s`: seconds with a running step."""

    id: str
    provisioned_s: float
    busy_s: float
    steps: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    unit_cost: float
    role: str = "collocated"


class ScaledOut(NamedTuple):
    """One added instance: when it was ordered and when it served.

    `warm`: its process was already up (a warm spare). `woken`: it was asleep.
    """

    id: str
    asked_at: float
    up_at: float
    warm: bool
    woken: bool = False


class ProgramRecord(NamedTuple):
    """A program (or single request) and how it ended. `e2e_s`: None if a call was lost. `earned`: its goodput."""

    id: str
    at: float
    kind: str
    stages: int
    calls: int
    tokens: int
    e2e_s: float | None
    deadline_s: float | None
    attained: bool
    earned: int


@dataclass(slots=True)
class RunResult:
    """`ended_at`: virtual seconds. `events`: number of happenings. `rounds`: passes of the scheduler."""

    policy: str
    records: list[SimRecord] = field(default_factory=list)
    programs: list[ProgramRecord] = field(default_factory=list)
    samples: list[FleetSample] = field(default_factory=list)
    instances: list[InstanceUse] = field(default_factory=list)
    ended_at: float = 0.0
    events: int = 0
    rounds: int = 0
    decisions: list[Decision] = field(default_factory=list)  # the scaler's
    moved_bytes: float = 0.0  # KV bytes moved between instances
    scaled_out: list[ScaledOut] = field(default_factory=list)
    pruned: set[str] = field(default_factory=set)  # ids of requests that orders put last at any time

    @property
    def cost(self) -> float:
        """HyperFlexis eq. 3: provisioned instance-seconds times unit cost."""
        return sum(use.provisioned_s * use.unit_cost for use in self.instances)
