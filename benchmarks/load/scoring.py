"""The score of a run: attainment by class, mean E2E, and medians over seeds with their spread."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load.generator import CUTOFF_S, LoadRun, RequestTiming
from benchmarks.load.workloads import Task


@dataclass(frozen=True, slots=True)
class Score:
    """One run.

    `e2e_mean_s` is over *all* requests: one that was cut, refused or failed counts as if it had ended at the cut-off,
    so that serving fewer requests never looks faster. `e2e_finished_s` is over the finished ones.
    """

    attainment: float
    by_class: Mapping[str, float]
    e2e_mean_s: float
    e2e_finished_s: float
    ttft_p50_s: Mapping[str, float]
    tpot_p50_s: Mapping[str, float]
    outcomes: Mapping[str, int]
    largest_gap_s: float
    cpu_share: Mapping[str, float] = field(default_factory=dict)  # of one core, by process, while the load lasted


def score(run: LoadRun, tasks: Sequence[Task], cutoff_s: float = CUTOFF_S) -> Score:
    """Score a run. Raises ValueError if it has no requests."""
    if not run.samples:
        raise ValueError("a run without requests has no score")
    by_task = {task: [s for s in run.samples if s.task == task.name] for task in tasks}
    met = {
        task: sum(sample.attained(task.targets.ttft_s, task.targets.tpot_s) for sample in samples)
        for task, samples in by_task.items()
    }
    finished = [s for s in run.samples if s.outcome == "ok"]
    end = max(s.due for s in run.samples) + cutoff_s
    e2e = [s.e2e_s if s.outcome == "ok" else end - s.due for s in run.samples]
    return Score(
        attainment=sum(met.values()) / len(run.samples),
        by_class={task.name: met[task] / len(samples) for task, samples in by_task.items() if samples},
        e2e_mean_s=statistics.fmean(e2e),
        e2e_finished_s=statistics.fmean([s.e2e_s for s in finished]) if finished else math.nan,
        ttft_p50_s=_medians(by_task, lambda sample: sample.ttft_s),
        tpot_p50_s=_medians(by_task, lambda sample: sample.tpot_s),
        outcomes=dict(Counter(s.outcome for s in run.samples)),  # asdict() cannot build a Counter
        largest_gap_s=run.largest_gap_s,
    )


def _medians(
    by_task: Mapping[Task, Sequence[RequestTiming]], figure: Callable[[RequestTiming], float]
) -> dict[str, float]:
    values = {task.name: [figure(s) for s in samples if s.outcome == "ok"] for task, samples in by_task.items()}
    return {name: round(statistics.median(of), 4) for name, of in values.items() if of}


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Medians over seeds, with the lowest and highest attainment as the spread."""
    attained = [score.attainment for score in scores]
    classes = scores[0].by_class
    return {
        "attainment": round(statistics.median(attained), 4),
        "attainment_spread": [round(min(attained), 4), round(max(attained), 4)],
        "e2e_mean_s": round(statistics.median(s.e2e_mean_s for s in scores), 3),
        "e2e_finished_s": _rounded(statistics.median(s.e2e_finished_s for s in scores)),
        "by_class": {name: round(statistics.median(s.by_class[name] for s in scores), 4) for name in classes},
        "runs": len(scores),
        "outcomes": dict(sum((Counter(score.outcomes) for score in scores), Counter())),
        "largest_gap_s": round(max(s.largest_gap_s for s in scores), 3),
        "cpu_share": {
            name: round(statistics.median(s.cpu_share.get(name, 0.0) for s in scores), 4)
            for name in dict.fromkeys(name for s in scores for name in s.cpu_share)
        },
    }


def _rounded(seconds: float) -> float | None:
    """Rounded, or None: JSON has no number for the mean of nothing."""
    return None if math.isnan(seconds) else round(seconds, 3)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; `share` in 0..1. Raises ValueError if there are no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
