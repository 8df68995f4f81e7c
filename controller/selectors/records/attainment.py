"""Attainment of classes over hours and days, from the roll-up by minute.

A request attained its targets if TTFT and TPOT are met, and the deadline if it has one. Refused, expired, failed and
cut requests are misses; cancelled ones are counted separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import DateTimeField, DurationField, F, Func, Q, QuerySet, Sum, Value

from controller.models import AttainmentMinute, histogram

COUNTS = (
    "finished", "attained", "ttft_met", "tpot_met", "refused", "expired", "failed", "cancelled", "prompt_tokens",
    "output_tokens", "goodput_tokens",
)  # fmt: skip
GROUPS = ("tenant", "slo_class", "model")
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Attainment:
    """One group over one window. Fields that are not grouped by are None. Latencies in seconds, by share (0.5, 0.95,
    0.99)."""

    tenant: str | None
    slo_class: str | None
    model: str | None
    finished: int
    attained: int
    ttft_met: int
    tpot_met: int
    refused: int
    expired: int
    failed: int
    cancelled: int
    prompt_tokens: int
    output_tokens: int
    goodput_tokens: int
    start: datetime | None = None  # of its bucket, in a series
    ttft_s: dict[float, float | None] | None = None
    tpot_s: dict[float, float | None] | None = None
    e2e_s: dict[float, float | None] | None = None
    first_tokens: int | None = None  # requests that `ttft_s` is of

    @property
    def share(self) -> float | None:
        return self.attained / self.finished if self.finished else None

    @property
    def ttft_share(self) -> float | None:
        return self.ttft_met / self.finished if self.finished else None

    @property
    def tpot_share(self) -> float | None:
        return self.tpot_met / self.finished if self.finished else None


def attainment(
    *,
    since: datetime,
    until: datetime,
    by: Sequence[str] = ("tenant", "slo_class"),
    tenant: str | None = None,
    slo_class: str | None = None,
    quantiles: bool = True,
) -> list[Attainment]:
    """Attainment by arrival in the whole minutes of [since, until), from the roll-up. One query, and one per
    latency."""
    groups = _groups(by)
    rows = _rolled(since, until, tenant, slo_class)
    sums = rows.values(*groups).annotate(**{f"sum_{name}": Sum(name) for name in COUNTS}).order_by(*groups)
    latencies = {what: _histograms(rows, groups, what) if quantiles else {} for what in ("ttft", "tpot", "e2e")}
    found = []
    for row in sums:
        key = tuple(row[name] for name in groups)
        fields: dict[str, Any] = {
            **{name: row.get(name) for name in GROUPS},
            **{name: row[f"sum_{name}"] for name in COUNTS},
            **{f"{what}_s": _quantiles(by_key[key]) for what, by_key in latencies.items() if key in by_key},
            "first_tokens": sum(latencies["ttft"][key]) if key in latencies["ttft"] else None,
        }
        found.append(Attainment(**fields))
    return found


def attainment_series(
    *,
    since: datetime,
    until: datetime,
    bucket: timedelta,
    by: Sequence[str] = ("slo_class",),
    tenant: str | None = None,
    slo_class: str | None = None,
) -> list[Attainment]:
    """Counts by bucket (a whole number of minutes, from `since` on) in order of time. One query."""
    if bucket < timedelta(minutes=1) or bucket % timedelta(minutes=1):
        raise ValueError("bucket: a whole number of minutes, at least one")
    groups = _groups(by)
    start = since.replace(second=0, microsecond=0)
    binned = Func(
        Value(bucket, DurationField()), F("minute"), Value(start), function="date_bin", output_field=DateTimeField()
    )
    rows = _rolled(start, until, tenant, slo_class).values(*groups, start=binned)
    rows = rows.annotate(**{f"sum_{name}": Sum(name) for name in COUNTS}).order_by("start", *groups)
    return [
        Attainment(
            **{name: row.get(name) for name in GROUPS},
            **{name: row[f"sum_{name}"] for name in COUNTS},
            start=row["start"],
        )
        for row in rows
    ]


def _groups(by: Sequence[str]) -> tuple[str, ...]:
    if not set(by) <= set(GROUPS):
        raise ValueError(f"by: of {', '.join(GROUPS)}")
    return tuple(by)


def _rolled(since: datetime, until: datetime, tenant: str | None, slo_class: str | None) -> QuerySet[AttainmentMinute]:
    wanted = Q(minute__gte=since.replace(second=0, microsecond=0), minute__lt=until)
    if tenant is not None:
        wanted &= Q(tenant=tenant)
    if slo_class is not None:
        wanted &= Q(slo_class=slo_class)
    return AttainmentMinute.objects.filter(wanted)


def _histograms(rows: QuerySet[AttainmentMinute], groups: Sequence[str], what: str) -> dict[tuple[Any, ...], list[int]]:
    """Bucket-wise sums of one latency's histograms by group: PostgreSQL adds column by column."""
    columns = {f"bucket_{place}": Sum(F(f"{what}_histogram__{place}")) for place in range(histogram.SIZE)}
    found = rows.values(*groups).annotate(**columns).order_by()
    return {tuple(row[name] for name in groups): [row[name] or 0 for name in columns] for row in found}


def _quantiles(counts: Iterable[int]) -> dict[float, float | None]:
    counts = list(counts)
    return {share: histogram.quantile(counts, share) for share in QUANTILES}
