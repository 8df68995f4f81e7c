"""Goodput by type of request, from the records: how much of what was served was in time (Concord ch. 3).

Requests of a workflow are not counted by themselves: the workflow counts once, in the minute in which it began, with
all of its tokens or none. Everything is counted in one query, however many requests there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection

from controller.slo.request_types import RequestType

GROUPS = ("minute", "type", "tenant", "slo_class")
# A workflow that began before the window is told from one that began in it by its requests this long before.
LOOK_BACK = timedelta(hours=1)

# What the engine refused counts as cancelled, as in the roll-up by minute.
_CANCELLED = "(outcome = 'cancelled' OR error_code = 'engine_rejected')"
_TYPE = f"""CASE WHEN target_deadline_s IS NOT NULL THEN '{RequestType.DEADLINE.value}'
    WHEN slo_class = '' AND decisions @> '[{{"kind": "slo", "reason": "defaults"}}]'
    THEN '{RequestType.BEST_EFFORT.value}'
    ELSE '{RequestType.LATENCY.value}' END"""
_ALONE = f"""
SELECT date_trunc('minute', arrived_at) AS minute, {_TYPE} AS type, tenant, slo_class,
    CASE WHEN {_CANCELLED} THEN 0 ELSE stands_for END AS finished,
    (attained AND NOT {_CANCELLED})::int AS in_time,
    CASE WHEN {_CANCELLED} THEN stands_for ELSE 0 END AS cancelled,
    CASE WHEN {_CANCELLED} OR outcome <> 'ok' THEN 0
        WHEN target_deadline_s IS NULL THEN output_tokens ELSE prompt_tokens + output_tokens END AS tokens,
    CASE WHEN {_CANCELLED} THEN 0 ELSE goodput_tokens END AS goodput_tokens
FROM request_record
WHERE workflow = '' AND arrived_at >= %(since)s AND arrived_at < %(until)s
    AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
"""
# When a workflow is due is what its gateway found of it: `left_s` after the step `workflow` of the request.
_CALLS = f"""
SELECT arrived_at, tenant, workflow, slo_class, outcome, attained, {_CANCELLED} AS cancelled,
    CASE WHEN outcome = 'ok' THEN prompt_tokens + output_tokens ELSE 0 END AS tokens,
    arrived_at + coalesce(e2e_s, 0) * interval '1 second' AS ended_at,
    arrived_at + (coalesce((step ->> 'at')::float, 0) + (step -> 'figures' ->> 'left_s')::float) * interval '1 second'
        AS due_at,
    CASE WHEN decisions -> -1 ->> 'kind' = 'cancel' THEN decisions -> -1 ->> 'reason' ELSE '' END AS ended_by
FROM request_record,
    LATERAL (SELECT jsonb_path_query_first(decisions, '$[*] ? (@.kind == "workflow")') AS step) AS found
WHERE workflow <> '' AND arrived_at >= %(look_back)s AND arrived_at < %(until)s
    AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
"""
# Without a deadline a workflow is in time if each of its requests is, by the targets of each.
_WORKFLOWS = f"""
SELECT min(arrived_at) AS began_at, tenant, (array_agg(slo_class ORDER BY arrived_at, ended_at))[1] AS slo_class,
    min(due_at) AS due_at,
    CASE WHEN min(due_at) IS NULL THEN coalesce(bool_and(attained) FILTER (WHERE NOT cancelled), false)
        ELSE bool_and(outcome = 'ok') AND max(ended_at) <= min(due_at) END
        AND NOT bool_or(ended_by = 'workflow_cancelled_by_operator') AS in_time,
    bool_or(ended_by = 'workflow_cancelled') OR (min(due_at) IS NULL AND bool_and(cancelled)
        AND NOT bool_or(ended_by = 'workflow_cancelled_by_operator')) AS cancelled,
    sum(tokens) AS tokens
FROM ({_CALLS}) AS calls GROUP BY tenant, workflow
"""
# One that is not due yet and has missed nothing counts once it is due: more of its requests may come.
_COMPOUND = f"""
SELECT date_trunc('minute', began_at), '{RequestType.COMPOUND.value}', tenant, slo_class, (NOT cancelled)::int,
    (in_time AND NOT cancelled)::int, cancelled::int, CASE WHEN cancelled THEN 0 ELSE tokens END,
    CASE WHEN in_time AND NOT cancelled THEN tokens ELSE 0 END
FROM ({_WORKFLOWS}) AS workflows
WHERE began_at >= %(since)s AND (cancelled OR NOT in_time OR due_at IS NULL OR due_at <= %(until)s)
"""
COUNTS = ("finished", "in_time", "cancelled", "tokens", "goodput_tokens")


@dataclass(frozen=True, slots=True)
class Goodput:
    """One group. What it is not grouped by is None. `finished`: requests and workflows that count, misses included,
    cancelled ones not. `tokens`: of their answers; of deadline and compound requests those of their prompts as well.
    `goodput_tokens`: those of them that were in time; of deadline and compound requests all or none."""

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
    *, since: datetime, until: datetime, by: Sequence[str] = ("type",), tenant: str | None = None
) -> list[Goodput]:
    """Goodput of what arrived in the whole minutes of [since, until), sorted by `by`. One query. Raises ValueError for
    a `by` that is not of `GROUPS`."""
    if not set(by) <= set(GROUPS) or not by:
        raise ValueError(f"by: one or more of {', '.join(GROUPS)}")
    groups = ", ".join(by)
    sums = ", ".join(f"sum({name})::bigint" for name in COUNTS)
    query = (
        f"SELECT {groups}, {sums} FROM ({_ALONE} UNION ALL {_COMPOUND}) AS counted GROUP BY {groups} ORDER BY {groups}"
    )
    start = since.replace(second=0, microsecond=0)
    given = {"since": start, "until": until, "look_back": start - LOOK_BACK, "tenant": tenant}
    with connection.cursor() as cursor:
        cursor.execute(query, given)
        rows = cursor.fetchall()
    empty = dict.fromkeys(GROUPS)
    return [Goodput(**{**empty, **dict(zip((*by, *COUNTS), row, strict=True))}) for row in rows]
