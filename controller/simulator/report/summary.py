"""The summary of a run: attainment by class, goodput, latency quantiles, queues over time, cost."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from controller.core.decisions import Decision
from controller.core.types import Outcome
from controller.simulator.report.results import ProgramRecord, RunResult, SimRecord
from controller.slo.attainment import quantile

SHARES = (0.5, 0.9, 0.95, 0.99)
POINTS = 100  # of a distribution
MOST_POINTS = 300  # of the queue over time: as many as a chart can show


def attainment(records: Sequence[SimRecord]) -> float:
    """Share of requests that met all targets. All misses count; requests cancelled by clients do not."""
    counted = [record for record in records if record.outcome is not Outcome.CANCELLED]
    return sum(record.attained for record in counted) / len(counted) if counted else 0.0


def of_class(records: Sequence[SimRecord]) -> dict[str, Any]:
    """Figures of one class (or of the whole run). Seconds; quantiles by nearest rank, None if there are no values."""
    promised = sorted(record.targets.ttft_s for record in records), sorted(record.targets.tpot_s for record in records)
    ttfts = sorted(record.ttft_s for record in records if record.ttft_s is not None)
    tpots = sorted(record.tpot_s for record in records if record.tpot_s is not None)
    e2es = sorted(record.e2e_s for record in records if record.e2e_s is not None)
    count = max(1, len(records))
    return {
        "requests": len(records),
        "attainment": attainment(records),
        "ttft_met": sum(record.ttft_met for record in records) / count,
        "tpot_met": sum(record.tpot_met for record in records) / count,
        "goodput_tokens": sum(record.goodput_tokens for record in records),
        "outcomes": dict(sorted(Counter(record.outcome.value for record in records).items())),
        "first_tokens": len(ttfts),
        "ttft_s": _quantiles(ttfts),
        "tpot_s": _quantiles(tpots),
        "e2e_s": _quantiles(e2es),
        "e2e_mean_s": statistics.fmean(e2es) if e2es else None,
        "distribution": {"ttft_s": distribution(ttfts), "tpot_s": distribution(tpots), "e2e_s": distribution(e2es)},
        "targets": {"ttft_s": _middle(promised[0]), "tpot_s": _middle(promised[1])},
    }


def distribution(ascending: Sequence[float]) -> list[float]:
    """Seconds at 0, 1, ... 100 % of the requests; empty if there are none."""
    last = len(ascending) - 1
    return [round(ascending[last * place // POINTS], 5) for place in range(POINTS + 1)] if ascending else []


def _middle(ascending: Sequence[float]) -> float | None:
    """The median target, since requests of a class may have targets of their own."""
    return ascending[len(ascending) // 2] if ascending else None


def _quantiles(ascending: Sequence[float]) -> dict[str, float | None]:
    return {f"p{round(100 * share)}": quantile(ascending, share) for share in SHARES}


def report(result: RunResult, warmup_s: float = 0.0) -> dict[str, Any]:
    """The whole run as plain JSON values. Requests that arrived before `warmup_s` are left out of every figure.

    In a workload of programs, attainment and goodput are those of programs (a late stage does not lose its program
    yet); latencies and outcomes are those of the calls.
    """
    records = [record for record in result.records if record.at >= warmup_s]
    classes: dict[str, list[SimRecord]] = defaultdict(list)
    for record in records:
        classes[record.slo_class].append(record)
    span = max(1e-9, result.ended_at - warmup_s)
    whole = of_class(records)
    by_class = {name: of_class(classes[name]) for name in sorted(classes)}
    programs = [program for program in result.programs if program.at >= warmup_s]
    if programs:
        whole |= _kept(programs)
        for kind in {program.kind for program in programs} & set(by_class):
            by_class[kind] |= _kept([program for program in programs if program.kind == kind])
    judged: Sequence[SimRecord | ProgramRecord] = programs or records
    return {
        "policy": result.policy,
        **whole,
        "by_class": by_class,
        "goodput_tokens_per_s": whole["goodput_tokens"] / span,
        "attained_per_s": sum(each.attained for each in judged) / span,
        "seconds": result.ended_at,
        "cost": result.cost,
        "utilisation": _utilisation(result),
        "preemptions": sum(use.preemptions for use in result.instances),
        "programs": of_programs(programs),
        "pruned": _pruned(result, records),
        "queue": queue_over_time(result),
        "time_to_scale_s": time_to_scale(result),
        "decisions": [_told(decision) for decision in result.decisions],
    }


def _pruned(result: RunResult, records: Sequence[SimRecord]) -> dict[str, int]:
    """Requests that orders put last at any time, and how many of them attained their targets."""
    found = [record for record in records if record.id in result.pruned]
    return {"requests": len(found), "attained": sum(record.attained for record in found)}


def _told(decision: Decision) -> dict[str, Any]:
    """With the sleepers that it woke or put to sleep, if any."""
    sleepers = {name: decision.figures[name] for name in ("woken", "asleep") if name in decision.figures}
    return {"at_s": decision.at, "kind": decision.kind, "reason": decision.reason, **sleepers}


def time_to_scale(result: RunResult) -> float | None:
    """Median seconds from the decision to an instance that serves; None if none was added."""
    seconds = [each.up_at - each.asked_at for each in result.scaled_out]
    return statistics.median(seconds) if seconds else None


def _kept(programs: Sequence[ProgramRecord]) -> dict[str, Any]:
    return {
        "attainment": sum(program.attained for program in programs) / len(programs),
        "goodput_tokens": sum(program.earned for program in programs),
    }


def of_programs(programs: Sequence[ProgramRecord]) -> dict[str, Any]:
    """By kind: share of programs in time, tokens earned and offered, end-to-end quantiles of those that ended."""
    kinds: dict[str, list[ProgramRecord]] = defaultdict(list)
    for program in programs:
        kinds[program.kind].append(program)
    return {
        kind: {
            "programs": len(found),
            "calls": sum(program.calls for program in found),
            "attainment": sum(program.attained for program in found) / len(found),
            "goodput": sum(program.earned for program in found),
            "tokens": sum(program.tokens for program in found),
            "e2e_s": _quantiles(sorted(program.e2e_s for program in found if program.e2e_s is not None)),
        }
        for kind, found in sorted(kinds.items())
    }


def _utilisation(result: RunResult) -> float:
    provisioned = sum(use.provisioned_s for use in result.instances)
    return sum(use.busy_s for use in result.instances) / provisioned if provisioned else 0.0


def queue_over_time(result: RunResult) -> dict[str, list[float]]:
    """Columns ready to draw, thinned evenly."""
    every = max(1, len(result.samples) // MOST_POINTS)
    samples = result.samples[::every]
    return {
        "at_s": [round(sample.at, 3) for sample in samples],
        "queued": [float(sample.queued) for sample in samples],
        "waiting": [float(sample.waiting) for sample in samples],
        "running": [float(sample.running) for sample in samples],
        "instances": [float(sample.instances) for sample in samples],
    }
