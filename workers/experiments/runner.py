"""Runs one claimed experiment in the simulator. Each run is stored when it ends, and progress is published meanwhile.

At each report of progress (at most twice a second) waiting previews are run, since a person waits for them and an
experiment may take minutes. A run is stopped by an exception from the progress callback: the lease was lost (cancelled,
removed or taken over), or the time is over.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from controller.core.errors import ConfigError
from controller.models import Experiment, ExperimentRun
from controller.services.experiments import runs as steps
from controller.services.experiments.reading import REQUESTS_MAX, RecordedReplay, prefix_note, read
from controller.services.experiments.runs import Lease, LeaseLost
from workers.experiments import preview_sample
from workers.experiments.preview_sample import PreviewSample, WrongSize
from workers.live import LiveUnavailable, send_experiment

if TYPE_CHECKING:
    from controller.simulator.experiment import ExperimentPlan as Simulated

log = logging.getLogger(__name__)

SAY_EVERY_S = 0.5
LONGEST_S = 900.0  # wall time of an experiment over all its attempts


class OutOfTime(Exception):
    """An experiment took longer than it may."""


def next_experiment(*, previews_only: bool = False) -> bool:
    """Claim the next experiment and run it. False: there is none."""
    claimed = steps.experiment_claim(previews_only=previews_only)
    if claimed is None:
        return False
    row, lease = claimed
    worker = ExperimentJob(row, lease)
    try:
        worker.carry_out()
    except LeaseLost:
        log.info("experiment %s: stopped, its lease was lost", row.slug)
    except ConfigError as error:
        worker.fail(str(error), error.field or "")
    except OutOfTime as error:
        worker.fail(str(error))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, MemoryError) as error:
        log.exception("experiment %s failed", row.slug)
        worker.fail(f"The simulation failed: {type(error).__name__}: {error}")
    worker.publish()
    return True


class ExperimentJob:
    """One experiment in one process."""

    def __init__(self, row: Experiment, lease: Lease, clock: Callable[[], float] = time.monotonic) -> None:
        self._row = row
        self._lease = lease
        self._clock = clock
        self._began = clock()
        self._said = -SAY_EVERY_S
        self._elsewhere = 0.0  # seconds spent on previews meanwhile
        self._total = self._done = 0
        self._sample: PreviewSample | None = None  # of a preview, once it is read
        self._preview = row.kind == Experiment.Kind.PREVIEW
        self._longest = preview_sample.GIVE_UP_S if self._preview else LONGEST_S

    # ---- the work -------------------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        self._say("Reading the traffic", 0.0, always=True)
        simulated = read(self._row.spec)
        if self._preview and isinstance(simulated[0].workload, RecordedReplay):
            of = self._row.spec["workload"].get("of", 0)
            self._sample = PreviewSample(simulated, self._clock, self._spent, of)
            self._sample.guess()
        runs = self._runs(simulated)
        self._total = len(runs)
        for run in runs:
            if self._sample is not None:  # also runs of an earlier attempt, whose sample may have been different
                run.report, seconds = self._sampled(self._sample, run)
                steps.run_finish(lease=self._lease, run=run, report=run.report, seconds=seconds)
            elif run.report is None:
                run.report, seconds = self._simulate(simulated[run.variant], run)
                steps.run_finish(lease=self._lease, run=run, report=run.report, seconds=seconds)
            self._done += 1
        if self._sample is not None:
            simulated = self._sample.simulated
        notes = [*self._row.notes, *self._notes(simulated)] if self._preview else None
        result = result_of(self._row, simulated, runs)
        if self._sample is not None:
            result["sample"] = self._sample.as_json()
        steps.experiment_finish(lease=self._lease, result=result, notes=notes, spent_s=self._spent())

    def _sampled(self, sample: PreviewSample, run: ExperimentRun) -> tuple[dict[str, Any], float]:
        """A run of a preview. The first one determines how many requests fit."""
        while True:
            sample.begin()
            try:
                found = self._simulate(sample.simulated[run.variant], run)
                if not self._done:
                    sample.ended()
            except WrongSize:
                continue
            return found

    def _simulate(self, one: Simulated, run: ExperimentRun) -> tuple[dict[str, Any], float]:
        """The report of a run, and the wall seconds that it took."""
        from controller.simulator.report.summary import report
        from controller.simulator.runner import run_once

        began = self._clock()
        result = run_once(one, one.contenders[0], run.rate, run.seed, self._progress)
        self._say(f"{run.label}: aggregating results", 1.0)
        return report(result, one.warmup_s), round(self._clock() - began, 3)

    def fail(self, error: str, field: str = "") -> None:
        try:
            steps.experiment_fail(lease=self._lease, error=error, field=field, spent_s=self._spent())
        except LeaseLost:
            log.info("experiment %s was cancelled while it failed", self._row.slug)

    def _runs(self, simulated: Sequence[Simulated]) -> list[ExperimentRun]:
        """The runs as an earlier attempt planned them; otherwise they are planned now."""
        rows = list(self._row.runs.order_by("number"))
        if rows:
            return rows
        from controller.simulator.runner import rates_of

        rates, knee = rates_of(simulated[0], self._progress)
        for one in simulated:
            self._check_size(one, max((rate for rate in rates if rate is not None), default=None))
        steps.runs_plan(
            lease=self._lease,
            labels=[one.contenders[0].label for one in simulated],
            rates=rates,
            seeds=simulated[0].seeds,
            knee=knee,
            notes=() if self._preview else [*self._row.notes, *self._notes(simulated)],
        )
        self._row.knee = knee
        return list(self._row.runs.order_by("number"))

    def _check_size(self, one: Simulated, rate: float | None) -> None:
        """Raises ConfigError if the workload has more requests than the estimate at its creation allowed."""
        requests = len(one.workload.demands(rate, one.seeds[0]))
        if requests > REQUESTS_MAX:
            raise ConfigError(f"{requests:,} requests per run exceed the limit of {REQUESTS_MAX:,}", field="workload")

    def _notes(self, simulated: Sequence[Simulated]) -> list[str]:
        replay = simulated[0].workload
        if not isinstance(replay, RecordedReplay):
            return [note for note in (prefix_note(self._row.spec),) if note]
        notes = []
        if replay.estimated:
            notes.append(
                f"{replay.estimated:,} of {len(replay.requests):,} requests were never answered; the median output "
                "length of their class is used."
            )
        return notes

    # ---- progress -------------------------------------------------------------------------------------------------

    def _progress(self, what: str, done: int, of: int) -> None:
        if self._sample is not None and not self._done:
            self._sample.look(done, of)
        self._say(what, done / of if of else 0.0)

    def _say(self, step: str, share: float, *, always: bool = False) -> None:
        """Report progress, at most twice a second. `share`: of the current run. Raises OutOfTime, LeaseLost."""
        now = self._clock()
        if now - self._said < SAY_EVERY_S and not always:
            return
        self._said = now
        spent = self._spent()
        if self._lease.spent_s + spent > self._longest:
            raise OutOfTime(
                f"It took longer than {self._longest:.0f} s: {self._done} of {self._total or '?'} runs finished. "
                "Try fewer requests, rates or seeds."
            )
        whole = (self._done + share) / self._total if self._total else 0.0
        steps.experiment_progress(lease=self._lease, progress=whole, step=step, spent_s=spent)
        self._tell("running", min(1.0, whole), step)
        if not self._preview:
            self._let_previews_by()

    def _let_previews_by(self) -> None:
        began = self._clock()
        while next_experiment(previews_only=True):
            pass
        self._elsewhere += self._clock() - began

    def _spent(self) -> float:
        return self._clock() - self._began - self._elsewhere

    def publish(self) -> None:
        """Publish the stored end of the experiment."""
        row = Experiment.objects.filter(pk=self._row.pk).only("state", "progress", "step").first()
        if row is not None:
            self._tell(row.state, row.progress, row.step)

    def _tell(self, state: str, progress: float, step: str) -> None:
        try:
            send_experiment({"slug": self._row.slug, "state": state, "progress": round(progress, 4), "step": step})
        except LiveUnavailable as error:
            log.debug("progress of %s was not sent: %s", self._row.slug, error)


# ---- figures ---------------------------------------------------------------------------------------------------------


def result_of(row: Experiment, simulated: Sequence[Simulated], runs: Sequence[ExperimentRun]) -> dict[str, Any]:
    """The result in the form of `runner.compare`: an entry for each policy at each rate, with medians over the
    seeds."""
    from controller.simulator.fleet.presence import numbers
    from controller.simulator.runner import summary

    groups: dict[tuple[float | None, int], list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs:
        if run.report is not None:
            groups[run.rate, run.variant].append(run.report)
    entries = []
    for (rate, variant), reports in groups.items():
        one = simulated[variant].contenders[0]
        least, most = numbers(simulated[variant].settings)
        head = {"policy": one.label, "policy_set": one.policy_set, "rate": rate, "instances": most}
        if least != most:
            head["instances_least"] = least
        entries.append({**head, **summary(reports)})
    return {"name": row.name, "seeds": row.seeds, "knee": row.knee, "level": simulated[0].level, "entries": entries}
