"""Recorded traffic as a workload: arrivals, lengths and targets, from the request records.

A request that never got its answer (refused, expired, failed, cut) is given the median answer length of its class, and
marked as estimated. A record that stands for several refused requests becomes as many arrivals, evenly spread. Requests
that their clients cancelled before the first token are left out. Prompts are not stored, so prefixes are not shared in
a replay.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, Q, QuerySet, Sum

from controller.core.types import ENGINE_REJECTED, Outcome, Targets
from controller.models import AttainmentMinute, RequestRecord
from controller.selectors.experiments.edits import SLODecision

REQUESTS_MAX = 50_000  # of one replay
USUAL_OUTPUT = 128  # tokens, if no answer of the class is on record
UNANSWERED = (Outcome.REFUSED, Outcome.EXPIRED, Outcome.FAILED, Outcome.CUT)
COLUMNS = (
    "arrived_at", "tenant", "slo_class", "priority", "outcome", "prompt_tokens", "output_tokens", "target_ttft_s",
    "target_tpot_s", "target_deadline_s", "waiting_time_s", "workflow", "may_defer", "attained", "stands_for",
    "last_arrived_at", "all_prompt_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordedWindow:
    """Requests that arrived in [since, until) for one model. `tenant`, `slo_class` None: all."""

    since: datetime
    until: datetime
    model: str
    tenant: str | None = None
    slo_class: str | None = None

    def matches(self) -> dict[str, str]:
        exact = {"model": self.model, "tenant": self.tenant, "slo_class": self.slo_class}
        return {name: value for name, value in exact.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a window that is replayed: [since, until), with `requests` of the `of` in the whole window (by whole
    minutes)."""

    since: datetime
    until: datetime
    requests: int
    of: int

    @property
    def cut(self) -> bool:
        return self.requests < self.of


@dataclass(frozen=True, slots=True)
class Arrival:
    """One recorded request. `at`: seconds after the first one; `estimated`: the length of its answer is estimated."""

    arrived_at: datetime
    at: float
    tenant: str
    slo_class: str
    priority: int | None
    prompt_tokens: int
    output_tokens: int
    targets: Targets
    workflow: str
    estimated: bool
    source: str = ""  # of the targets: class, priority, explicit and so on; only read for previews
    figures: Mapping[str, Any] = field(default_factory=dict)
    may_defer: bool = False
    attained: bool | None = None  # as recorded; None: its client cancelled it


def busiest(window: RecordedWindow, limit: int = REQUESTS_MAX) -> Stretch:
    """The whole window if it has at most `limit` requests, else its densest stretch of whole minutes.

    Sampling requests would change the load and with it every figure; a stretch keeps the traffic as it was.
    """
    counts = _by_minute(window)
    total = sum(count for _, count in counts)
    if total <= limit:
        return Stretch(window.since, window.until, total, total)
    first, last, held = _densest(counts, limit)
    since = max(window.since, counts[first][0])
    return Stretch(since, min(window.until, counts[last][0] + timedelta(minutes=1)), min(held, limit), total)


def _by_minute(window: RecordedWindow) -> list[tuple[datetime, int]]:
    from_minute = window.since.replace(second=0, microsecond=0)
    rows = AttainmentMinute.objects.filter(minute__gte=from_minute, minute__lt=window.until, **window.matches())
    sums = rows.values("minute").annotate(count=Sum(F("finished") + F("cancelled"))).order_by("minute")
    return [(row["minute"], row["count"]) for row in sums if row["count"]]


def _densest(counts: Sequence[tuple[datetime, int]], limit: int) -> tuple[int, int, int]:
    """Indexes of the first and last minute of the stretch of at most `limit` requests with the highest rate.

    Among stretches with at least nine tenths of the limit the shortest is taken. A single minute may exceed the limit.
    """
    best: tuple[float, int, int, int] | None = None
    first, held = 0, 0
    for last, (minute, count) in enumerate(counts):
        held += count
        while held > limit and first < last:
            held -= counts[first][1]
            first += 1
        minutes = (minute - counts[first][0]).total_seconds() / 60 + 1
        if held >= 0.9 * limit or best is None:
            found = (held / minutes, first, last, held)
            best = max(best, found) if best is not None and best[3] >= 0.9 * limit else found
    assert best is not None
    return best[1:]


def arrivals(
    window: RecordedWindow, limit: int = REQUESTS_MAX, newest: bool = False, sources: bool = False
) -> list[Arrival]:
    """At most `limit` requests of the window in order of arrival: its first ones, or the newest. `sources`: with those
    of targets."""
    rows = rows_of(window).order_by(*(("-arrived_at", "-id") if newest else ("arrived_at", "id")))
    if sources:
        rows = rows.annotate(slo=SLODecision("decisions"))
    found = list(rows.values(*COLUMNS, *(("slo",) if sources else ()))[:limit])
    each = sorted((one for row in found for one in _each(row)), key=lambda row: row["arrived_at"])
    return _arrivals(each[-limit:] if newest else each[:limit])


def _each(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests that a record stands for, from the first to the last arrival, each with their mean prompt."""
    requests = row["stands_for"]
    if requests == 1:
        return [row]
    step = (row["last_arrived_at"] - row["arrived_at"]) / (requests - 1)
    prompt = max(1, round(row["all_prompt_tokens"] / requests))
    return [
        row | {"arrived_at": row["arrived_at"] + number * step, "prompt_tokens": prompt} for number in range(requests)
    ]


def rows_of(window: RecordedWindow) -> QuerySet[RequestRecord]:
    """Records without those that an engine rejected, and without those that were cancelled before the first token."""
    rows = RequestRecord.objects.filter(
        arrived_at__gte=window.since, arrived_at__lt=window.until, prompt_tokens__gt=0, **window.matches()
    )
    return rows.exclude(error_code=ENGINE_REJECTED).exclude(Q(outcome=Outcome.CANCELLED.value) & Q(output_tokens=0))


def _arrivals(rows: Sequence[Mapping[str, Any]]) -> list[Arrival]:
    if not rows:
        return []
    usual = _usual_outputs(rows)
    start = rows[0]["arrived_at"]
    found = []
    for row in rows:
        unanswered = row["outcome"] in UNANSWERED or row["output_tokens"] < 1
        output = max(row["output_tokens"], usual[row["slo_class"]]) if unanswered else row["output_tokens"]
        deadline, waiting = row["target_deadline_s"], row["waiting_time_s"]
        targets = Targets(
            row["target_ttft_s"],
            row["target_tpot_s"],
            deadline,
            waiting if waiting is not None else Targets._field_defaults["waiting_time_s"],
        )
        slo = row.get("slo") or {}
        found.append(
            Arrival(
                row["arrived_at"],
                (row["arrived_at"] - start).total_seconds(),
                row["tenant"],
                row["slo_class"],
                row["priority"],
                row["prompt_tokens"],
                output,
                targets,
                row["workflow"],
                unanswered,
                slo.get("reason", ""),
                slo.get("figures") or {},
                row["may_defer"],
                None if row["outcome"] == Outcome.CANCELLED else row["attained"],
            )
        )
    return found


def _usual_outputs(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, int]:
    seen: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        if row["outcome"] == Outcome.OK.value and row["output_tokens"] > 0:
            seen[row["slo_class"]].append(row["output_tokens"])
    every = [tokens for each in seen.values() for tokens in each]
    common = round(statistics.median(every)) if every else USUAL_OUTPUT
    usual: dict[str, int] = defaultdict(lambda: common)
    return usual | {name: round(statistics.median(tokens)) for name, tokens in seen.items()}


def busiest_models(since: datetime, until: datetime) -> list[str]:
    """The models with requests in the window, the one with the most first."""
    rows = AttainmentMinute.objects.filter(minute__gte=since.replace(second=0, microsecond=0), minute__lt=until)
    counted = rows.values("model").annotate(count=Sum("finished")).order_by("-count", "model")
    return [each["model"] for each in counted]


def busiest_model(since: datetime, until: datetime) -> str | None:
    return next(iter(busiest_models(since, until)), None)
