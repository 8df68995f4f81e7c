"""Goodput by type of request: how much of what was served was in time (Concord ch. 3).

Read from the roll-up by minute and from the results of workflows, both as of the last record that was stored. Requests
of a workflow are not counted by themselves: the workflow counts once, in the minute in which it ends, with all of its
tokens or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection
from django.db.models import Count, Q, QuerySet, Sum
from django.db.models.functions import Coalesce

from controller.models import WorkflowResult
from controller.slo.request_types import RequestType

GROUPS = ("minute", "type", "tenant", "slo_class")
COUNTS = ("finished", "in_time", "cancelled", "tokens", "goodput_tokens")
MINUTE = timedelta(minutes=1)
RESULTS_ORDER = ("-ends_at", "-id")
_OF_RESULT = {
    "in_time": Q(in_time=True, excluded=False),
    "missed": Q(in_time=False, excluded=False),
    "cancelled": Q(excluded=True),  # by its client, so that it does not count
}
RESULTS = tuple(_OF_RESULT)

_ALONE = f"""
SELECT minute AS at, type, tenant, slo_class, {", ".join(COUNTS)} FROM goodput_minute
WHERE minute >= %(since)s AND minute < %(until)s AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
"""
_COMPOUND = f"""
SELECT ends_at, '{RequestType.COMPOUND.value}', tenant, slo_class, (NOT excluded)::int, in_time::int, excluded::int,
    CASE WHEN excluded THEN 0 ELSE tokens END, CASE WHEN in_time THEN tokens ELSE 0 END
FROM workflow_result
WHERE ends_at >= %(since)s AND ends_at < %(until)s AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
"""
_MINUTE = "date_bin(make_interval(secs => %(bucket_s)s), at, %(since)s) AS minute"


@dataclass(frozen=True, slots=True)
class Goodput:
    """One group. What it is not grouped by is None. `minute`: the start of its bucket. `finished`: requests and
    workflows that count, misses included, cancelled ones not. `tokens`: of their answers; of deadline and compound
    requests those of their prompts as well. `goodput_tokens`: those of them that were in time; of deadline and compound
    requests all or none."""

    minute: datetime | None
    type: str | None
    tenant: str | None
    slo_class: str | None
    finished: int
    in_time: int
    cancelled: int
    tokens: int
    goodput_tokens: int

    @property
    def share(self) -> float | None:
        """Of the requests, 0..1."""
        return self.in_time / self.finished if self.finished else None

    @property
    def token_share(self) -> float | None:
        """Of the tokens, 0..1."""
        return self.goodput_tokens / self.tokens if self.tokens else None


def goodput(
    *,
    since: datetime,
    until: datetime,
    by: Sequence[str] = ("type",),
    tenant: str | None = None,
    bucket: timedelta = MINUTE,
) -> list[Goodput]:
    """Goodput of the whole minutes of [since, until), sorted by `by`; of requests by arrival, of workflows by end. One
    query. `bucket`: what the group `minute` covers, a whole number of minutes. Raises ValueError for a `by` that is not
    of `GROUPS`, and for another bucket."""
    if not set(by) <= set(GROUPS) or not by:
        raise ValueError(f"by: one or more of {', '.join(GROUPS)}")
    if bucket < MINUTE or bucket % MINUTE:
        raise ValueError("bucket: a whole number of minutes, at least one")
    groups = ", ".join(by)
    columns = ", ".join(_MINUTE if name == "minute" else name for name in by)
    sums = ", ".join(f"sum({name})::bigint" for name in COUNTS)
    counted = f"({_ALONE} UNION ALL {_COMPOUND}) AS counted"
    query = f"SELECT {columns}, {sums} FROM {counted} GROUP BY {groups} ORDER BY {groups}"
    given = {
        "since": since.replace(second=0, microsecond=0),
        "until": until,
        "tenant": tenant,
        "bucket_s": bucket.total_seconds(),
    }
    with connection.cursor() as cursor:
        cursor.execute(query, given)
        rows = cursor.fetchall()
    empty = dict.fromkeys(GROUPS)
    return [Goodput(**{**empty, **dict(zip((*by, *COUNTS), row, strict=True))}) for row in rows]


def workflow_goodput(*, since: datetime, until: datetime) -> list[Goodput]:
    """Of workflows that ended in [since, until), by tenant and class. One query."""
    rows = WorkflowResult.objects.filter(ends_at__gte=since, ends_at__lt=until)
    counted = Q(excluded=False)
    sums = rows.values("tenant", "slo_class").annotate(
        finished=Count("id", filter=counted),
        timely=Count("id", filter=Q(in_time=True)),
        cancelled_ones=Count("id", filter=~counted),
        all_tokens=Coalesce(Sum("tokens", filter=counted), 0),
        goodput_tokens=Coalesce(Sum("tokens", filter=Q(in_time=True)), 0),
    )
    return [
        Goodput(
            None, RequestType.COMPOUND.value, row["tenant"], row["slo_class"], row["finished"], row["timely"],
            row["cancelled_ones"], row["all_tokens"], row["goodput_tokens"],
        )
        for row in sums.order_by("tenant", "slo_class")
    ]  # fmt: skip


_BY_STAGE = """
WITH ended AS MATERIALIZED (
    SELECT tenant, workflow, began_at, ended_at, in_time FROM workflow_result
    WHERE ends_at >= %(since)s AND ends_at < %(until)s AND NOT excluded
        AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
)
SELECT r.tenant, r.stage, count(DISTINCT w.workflow)::bigint, count(*)::bigint,
    (count(*) FILTER (WHERE r.outcome = 'ok'))::bigint, count(share.s)::bigint,
    (count(share.s) FILTER (WHERE r.outcome = 'ok' AND r.e2e_s <= share.s))::bigint,
    coalesce(sum(r.prompt_tokens + r.output_tokens), 0)::bigint,
    coalesce(sum(r.prompt_tokens + r.output_tokens) FILTER (WHERE w.in_time), 0)::bigint
FROM ended w
JOIN request_record r ON r.tenant = w.tenant AND r.workflow = w.workflow AND r.workflow <> ''
    AND r.arrived_at BETWEEN w.began_at AND w.ended_at
LEFT JOIN LATERAL (
    SELECT (step->'figures'->>'step_s')::float8 AS s FROM jsonb_array_elements(r.decisions) AS step
    WHERE step->>'kind' = 'workflow' AND step->'figures' ? 'step_s' LIMIT 1
) AS share ON true
WHERE r.arrived_at >= (SELECT min(began_at) FROM ended) AND r.arrived_at < %(until)s
GROUP BY r.tenant, r.stage ORDER BY r.tenant, r.stage
"""


@dataclass(frozen=True, slots=True)
class StageGoodput:
    """A stage of a tenant's workflows that ended. `stage`: "" for requests that named none. `answered`: of `requests`.
    `shared`: those that got a share of their workflow's time, and `in_share`, answered within it. `tokens`: of their
    prompts and answers; `goodput_tokens`: those of workflows that were in time as a whole."""

    tenant: str
    stage: str
    workflows: int
    requests: int
    answered: int
    shared: int
    in_share: int
    tokens: int
    goodput_tokens: int


def stage_goodput(*, since: datetime, until: datetime, tenant: str | None = None) -> list[StageGoodput]:
    """Of workflows that ended in [since, until) and count, by tenant and stage. One query, which reads the requests of
    these workflows."""
    with connection.cursor() as cursor:
        cursor.execute(_BY_STAGE, {"since": since, "until": until, "tenant": tenant})
        return [StageGoodput(*row) for row in cursor.fetchall()]


def workflow_results(
    *,
    since: datetime,
    until: datetime,
    tenant: str | None = None,
    workflow: str | None = None,
    slo_class: str | None = None,
    result: str | None = None,
) -> QuerySet[WorkflowResult]:
    """Workflows that ended in [since, until). None is any. `result`: of `RESULTS`; raises KeyError for another."""
    rows = WorkflowResult.objects.filter(ends_at__gte=since, ends_at__lt=until)
    wanted = {"tenant": tenant, "workflow": workflow, "slo_class": slo_class}
    rows = rows.filter(**{name: value for name, value in wanted.items() if value is not None})
    return rows if result is None else rows.filter(_OF_RESULT[result])


def result_of(row: WorkflowResult) -> str:
    """Of `RESULTS`."""
    return "cancelled" if row.excluded else "in_time" if row.in_time else "missed"


def ended_workflows(
    *, since: datetime, until: datetime, tenant: str | None = None, in_time: bool | None = None, most: int = 50
) -> list[WorkflowResult]:
    """Workflows that ended in [since, until) and count, the last one first, at most `most`. `in_time`: None is both."""
    rows = workflow_results(since=since, until=until, tenant=tenant).filter(excluded=False)
    if in_time is not None:
        rows = rows.filter(in_time=in_time)
    return list(rows.order_by(*RESULTS_ORDER)[:most])
