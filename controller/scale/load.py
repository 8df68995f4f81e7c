"""What the scaler sees of a fleet, and its load: the one number it decides by (HyperFlexis Alg. 3's f, worked example
H11).

HyperFlexis (sec. 4) scales out when any signal is high and in when all are low. The maximum of three normalised signals
says both: mean utilisation, the longest wait over its SLO, arrival rate over processing rate.

The paper's R_Process is the rate at which the fleet *can* process. The requests finished in a window show that rate
only while the fleet is full. At low load they follow the arrivals, some seconds late, so a few arrivals in a 10 s
window would read as overload (3 arrived, 2 finished: 1.5). `processing_rate` therefore divides the finished rate by the
utilisation it took, and is unknown where the window holds too few requests and nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from controller.core.decisions import Figure
from controller.core.load import WORK_WINDOW_S
from controller.core.staleness import STALE_PERIODS

RATE_WINDOW_S = 10.0  # over which gateways count arrivals and completions
LEAST_COUNTED_S = 1.0  # what was counted for less is taken as counted for so long
FEWEST_FINISHED = 5.0  # with fewer in a window, and nothing queued, the rate is unknown
LEAST_UTILISATION = 0.05  # below, finished / utilisation is noise
CLEARLY_FASTER = 1.5  # instances of one kind differ by less, once each has learned from its own traffic


@dataclass(frozen=True, slots=True)
class Member:
    """One instance of the fleet. `outstanding`: requests running or waiting there; `fixed`: not ours to stop;
    `takes_both_roles`: it can serve the other stage too, whoever runs it; `needed`: of all instances it alone can keep
    the targets of some recent request, or if it drains, none that serves can. `speed`: what it can do, in any unit that
    its stage shares; 0: not known."""

    id: str
    state: str  # starting | ready | draining
    utilisation: float = 0.0
    outstanding: int = 0
    fixed: bool = False
    takes_both_roles: bool = True
    needed: bool = False
    speed: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetObservation:
    """What was seen of a stage's fleet at one moment.

    `age_s`: age of the telemetry; None: there was no snapshot at all. Rates in requests/s; `processing_rate` None:
    unknown. `startable` false: nothing can give another instance, for the reason `held_by` (no pattern to make one
    like, or no free device). `start_s`: expected seconds until another instance would serve in place of a stopped one;
    None: not known, or so few that it does not matter. `taken`: requests are accepted, by instances of another role if
    by none of `members`. `needed_asleep`: a sleeper keeps the targets of some recent request, and none of `members`
    does; `needed_stopped`: the same of one that was stopped, and one like it could be started. `counted_s`: for how
    long the gateways have counted; None: for longer than they look back.
    """

    members: tuple[Member, ...]
    age_s: float | None
    period_s: float = 1.0
    wait_over_slo: float = 0.0
    arrival_rate: float = 0.0
    processing_rate: float | None = None
    queued: int = 0
    startable: bool = True
    held_by: str = "nothing_to_start"
    taken: bool = False
    start_s: float | None = None
    needed_asleep: bool = False
    needed_stopped: bool = False
    counted_s: float | None = None

    def with_processing_rate(self, rate: float | None) -> FleetObservation:
        """The same with a processing rate; of a deserted fleet it is known to be 0, although refused requests never
        queue and so leave nothing to measure."""
        return replace(self, processing_rate=0.0 if self.deserted else rate)

    @property
    def deserted(self) -> bool:
        """No instance serves or starts, so requests are refused on arrival or wait for one that the scaler starts."""
        return not self.taken and not self.having("ready") and not self.having("starting")

    @property
    def stale(self) -> bool:
        return self.age_s is None or self.age_s > STALE_PERIODS * self.period_s

    def having(self, state: str) -> list[Member]:
        return [member for member in self.members if member.state == state]

    @property
    def mean_utilisation(self) -> float:
        return _mean([member.utilisation for member in self.having("ready")])

    @property
    def load(self) -> float:
        if self.deserted and self.queued:
            return math.inf  # also of one that waits longer than arrivals are counted, and is far from its target
        utilisations = [member.utilisation for member in self.having("ready")]
        return load_metric(utilisations, [self.wait_over_slo], self.arrival_rate, self.processing_rate)

    @property
    def whole_load(self) -> float:
        """The load if work went on like this before it was counted. Gateways average computing over the last seconds,
        so one that has just started shows a part of it: a fleet that is full reads 0.18 after one second. That is no
        reason to add an instance yet, and none to remove one."""
        if self.counted_s is None:
            return self.load
        return self.load / (1.0 - math.exp(-max(self.counted_s, LEAST_COUNTED_S) / WORK_WINDOW_S))

    def load_without(self, member: Member, peak: float = 0.0) -> float:
        """The load (`whole_load`) if the others had its work too. A fast one among unlike instances leaves more to do,
        and one moment says little of that: `peak` is the highest load of late."""
        ready = self.having("ready")
        speeds = [each.speed for each in ready]
        if min(speeds, default=0.0) <= 0 or max(speeds) <= CLEARLY_FASTER * min(speeds):
            left = len(self.members) - len(self.having("draining")) - 1
            return self.whole_load * (left + 1) / left if left else math.inf
        total = sum(speeds)
        busy = sum(each.speed * each.utilisation for each in ready) / total
        left_speed = total - (member.speed if member in ready else 0.0)
        return max(self.whole_load, busy, peak) * total / left_speed if left_speed > 0 else math.inf

    def figures(self) -> dict[str, Figure]:
        """The inputs, for the Decision. An infinite ratio (arrivals, but nothing processed) becomes None."""
        ratio = rate_ratio(self.arrival_rate, self.processing_rate)
        start: dict[str, Figure] = {} if self.start_s is None else {"start_s": round(self.start_s, 1)}
        return {
            "load": _finite(self.load),
            "utilisation": round(self.mean_utilisation, 4),
            "wait_over_slo": round(self.wait_over_slo, 4),
            "arrival_rate": round(self.arrival_rate, 3),
            "processing_rate": None if self.processing_rate is None else round(self.processing_rate, 3),
            "rate_ratio": _finite(ratio),
            "queued": self.queued,
            "ready": len(self.having("ready")),
            "starting": len(self.having("starting")),
            "draining": len(self.having("draining")),
            "snapshot_age_s": None if self.age_s is None else round(self.age_s, 2),
            **start,
        }


def load_metric(
    utilisations: list[float], waits: list[float], arrival_rate: float, service_rate: float | None
) -> float:
    """Worked example H11. `waits`: wait over SLO of requests in the queue. An unknown service rate (None) leaves that
    signal out."""
    return max(_mean(utilisations), max(waits, default=0.0), rate_ratio(arrival_rate, service_rate))


def rate_ratio(arrival_rate: float, service_rate: float | None) -> float:
    """A service rate of 0 with arrivals is overload (infinite), without arrivals no load."""
    if service_rate is None or arrival_rate <= 0:
        return 0.0
    return arrival_rate / service_rate if service_rate > 0 else math.inf


def processing_rate(finished_rate: float, utilisation: float, queued: int, arrival_rate: float = 0.0) -> float | None:
    """Requests/s that the fleet could finish, from what it finished and how busy that kept it; None: unknown.

    While nothing waits, every arrived request is being worked on and counts as processed although it has not ended yet.
    Otherwise a rise of traffic would read as overload for as long as one answer takes.
    """
    if queued == 0:
        if finished_rate * RATE_WINDOW_S < FEWEST_FINISHED:
            return None
        finished_rate = max(finished_rate, arrival_rate)
    return finished_rate / min(1.0, max(utilisation, LEAST_UTILISATION))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
