"""How many of the newest requests a preview simulates: all, or as many as this machine simulates in PLANNED_S.

A probe estimates the number. The first run corrects it while it runs, since the time per request depends on the length
of the queue and on other load of the machine. All runs of a preview take the same requests, so that their results can
be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controller.services.experiments.reading import RecordedReplay

if TYPE_CHECKING:
    from controller.simulator.experiment import ExperimentPlan as Simulated

PLANNED_S = 10.0  # a person waits for the preview
GIVE_UP_S = 90.0  # the machine may be busier than the first run showed; a late result is better than none
RUN_SHARE = 0.8  # of that until the last run ends; the rest is for aggregating and transport
WARM_UP, PROBE = 30, 200  # requests of the run that loads modules, and of those that measure the speed
PROBES = 2  # the faster one counts, since the other one was disturbed
TOLERATED = 1.15  # a run that will take longer than planned by more than this factor is restarted with fewer requests
CAREFUL = 0.9  # of the requests that should fit according to a finished run
WORTH_MORE = 1.5  # the first run is repeated if this many times its requests would fit


class WrongSize(Exception):
    """The first run shows that another number of requests fits. The sample was changed; restart the run."""


class PreviewSample:
    """`simulated`: the runs of the preview, each on the sample. `spent`: seconds since the preview began; `clock`:
    monotonic seconds."""

    def __init__(
        self, simulated: Sequence[Simulated], clock: Callable[[], float], spent: Callable[[], float], of: int = 0
    ) -> None:
        """`of`: the number of recorded requests, if not all of them were read."""
        self._whole = list(simulated)
        self._clock, self._spent = clock, spent
        self._all = len(_replay(simulated).requests)
        self._of = max(of, self._all)
        self._began, self._left = 0.0, 0.0
        self._grown = False
        self.simulated = self._whole

    @property
    def requests(self) -> int:
        return len(_replay(self.simulated).requests)

    def guess(self) -> None:
        """Estimate the size of the sample with a probe."""
        from controller.simulator.runner import run_once

        if self._all <= PROBE:
            return
        first, taken = self._whole[0], []
        for count in (WARM_UP, *[PROBE] * PROBES):
            began = self._clock()
            run_once(newest(first, count), first.contenders[0], None, 1)
            taken.append(self._clock() - began)
        each = max(1e-6, min(taken[1:]) / PROBE)
        self._take(int(self._time_left() / (len(self._whole) * each)))

    def begin(self) -> None:
        """Call when a run starts."""
        self._began, self._left = self._clock(), self._time_left()

    def look(self, done: int, of: int) -> None:
        """Call during the first run with the number of ended requests. Raises WrongSize if the runs would take too
        long."""
        self._check(done / of if of else 1.0)

    def ended(self) -> None:
        """Call after the first run. Raises WrongSize if the other runs would take too long, or if many more requests
        would fit."""
        self._check(1.0)
        each = (self._clock() - self._began) / self.requests
        fitting = int(CAREFUL * self._time_left() / (len(self._whole) * max(1e-9, each)))
        if not self._grown and min(fitting, self._all) > WORTH_MORE * self.requests:
            self._grown = True
            self._take(fitting)
            raise WrongSize

    def _check(self, share: float) -> None:
        if share <= 0 or self.requests <= PROBE:
            return
        needed = (self._clock() - self._began) / share * len(self._whole)
        if needed > TOLERATED * self._left:
            self._grown = True
            self._take(int(self.requests * CAREFUL * max(0.0, self._time_left()) / needed))
            raise WrongSize

    def _take(self, count: int) -> None:
        count = min(self._all, max(PROBE, count))
        self.simulated = [newest(one, count) for one in self._whole]

    def _time_left(self) -> float:
        return PLANNED_S * RUN_SHARE - self._spent()

    def as_json(self) -> dict[str, Any]:
        """The sample and its recorded attainment: the number of requests, their first and last arrival (epoch seconds),
        the attained share of all and by class, and how many `counted` for it. Cancelled requests do not count."""
        replay = _replay(self.simulated)
        counted: dict[str, list[bool]] = defaultdict(list)
        for demand, origin in zip(replay.requests, replay.origins, strict=True):
            if origin.attained is not None:
                counted[demand.slo_class].append(origin.attained)
        every = [attained for each in counted.values() for attained in each]
        return {
            "requests": len(replay.requests),
            "of": self._of,
            "since": replay.began,
            "until": replay.began + (replay.requests[-1].at if replay.requests else 0.0),
            "attained": sum(every) / len(every) if every else None,
            "counted": {name: len(found) for name, found in sorted(counted.items())},
            "by_class": {name: sum(found) / len(found) for name, found in sorted(counted.items())},
        }


def newest(one: Simulated, count: int) -> Simulated:
    """The run with only the newest requests of its replay, and with the instances of that time."""
    from controller.simulator.fleet.presence import from_second

    whole = _replay([one])
    kept = whole.newest(count)
    return replace(one, workload=kept, settings=from_second(one.settings, kept.began - whole.began))


def _replay(simulated: Sequence[Simulated]) -> RecordedReplay:
    workload = simulated[0].workload
    assert isinstance(workload, RecordedReplay)
    return workload
