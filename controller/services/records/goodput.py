"""Goodput by minute and type, and the result of each workflow: added to with the records, in their transaction.

A record counts when it is stored, however late that is. A workflow's requests come from several gateways in any order,
so its row holds sums from which PostgreSQL tells whether it was in time (`models.WorkflowResult`). That it was
cancelled may come before its requests, or without any: then its row has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from django.db.backends.utils import CursorWrapper
from psycopg import sql

from controller.core.types import Outcome, RequestRecord, WorkflowCancellation, given_up
from controller.slo.request_types import GoodputCounts, RequestType, goodput_counts, type_of

# A name that was silent for this long, and is past its deadline, is that of another workflow when it is used again.
REUSED_AFTER = timedelta(hours=1)
CANCELLED_BY = {"workflow_cancelled": "tenant", "workflow_cancelled_by_operator": "operator"}

_MINUTE_KEY = ("minute", "tenant", "slo_class", "type")
_MINUTE_COUNTS = GoodputCounts._fields
_WORKFLOW_COUNTS = ("requests", "failed", "missed", "cancelled", "tokens")
# As PostgreSQL types, in the order of `_Workflow.row`.
_WORKFLOW_COLUMNS = {
    **dict.fromkeys(("tenant", "workflow", "slo_class"), "varchar"),
    **dict.fromkeys(("began_at", "ended_at", "due_at"), "timestamptz"),
    "cancelled_by": "varchar",
    "cancelled_at": "timestamptz",
    **dict.fromkeys(_WORKFLOW_COUNTS, "bigint"),
}


def _names(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def _sums(table: str, names: Iterable[str]) -> sql.Composed:
    each = "{1} = {0}.{1} + EXCLUDED.{1}"
    return sql.SQL(", ").join(sql.SQL(each).format(sql.Identifier(table), sql.Identifier(name)) for name in names)


def _places(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join([sql.Placeholder()] * len(names))


_ADD_MINUTE = sql.SQL("INSERT INTO goodput_minute ({}) VALUES ({}) ON CONFLICT ({}) DO UPDATE SET {}").format(
    _names((*_MINUTE_KEY, *_MINUTE_COUNTS)),
    _places((*_MINUTE_KEY, *_MINUTE_COUNTS)),
    _names(_MINUTE_KEY),
    _sums("goodput_minute", _MINUTE_COUNTS),
)
# When the workflow of a row is past its deadline, or cancelled, and past the end of its requests.
_OVER_AT = "greatest({0}ended_at, least({0}due_at, {0}cancelled_at))"
_LEAVE_OLD = (
    "UPDATE workflow_result SET latest = false"
    f" WHERE tenant = %s AND workflow = %s AND latest AND {_OVER_AT.format('')} < %s"
)


def _merged(table: str, added: str) -> sql.Composed:
    """What becomes of a row of `table` to which `added` is added. Its class, beginning and end are those of its
    requests, if it has any. Whoever cancelled it first did; where that is not known, the tenant wins: "tenant" >
    "operator" > ""."""
    of_requests = "CASE WHEN {{1}}.requests = 0 THEN {{0}}.{0} WHEN {{0}}.requests = 0 THEN {{1}}.{0} ELSE {1} END"
    class_ = "CASE WHEN {1}.began_at < {0}.began_at THEN {1}.slo_class ELSE {0}.slo_class END"
    chosen = (
        f"slo_class = {of_requests.format('slo_class', class_)},"
        f" began_at = {of_requests.format('began_at', 'least({0}.began_at, {1}.began_at)')},"
        f" ended_at = {of_requests.format('ended_at', 'greatest({0}.ended_at, {1}.ended_at)')},"
        " due_at = least({0}.due_at, {1}.due_at),"
        " cancelled_by = CASE"
        " WHEN {1}.cancelled_by = '' OR {0}.cancelled_at <= {1}.cancelled_at THEN {0}.cancelled_by"
        " WHEN {0}.cancelled_by = '' OR {1}.cancelled_at < {0}.cancelled_at THEN {1}.cancelled_by"
        ' ELSE greatest({0}.cancelled_by COLLATE "C", {1}.cancelled_by) END,'
        " cancelled_at = least({0}.cancelled_at, {1}.cancelled_at)"
    )
    each = ", ".join(f"{name} = {{0}}.{name} + {{1}}.{name}" for name in _WORKFLOW_COUNTS)
    return sql.SQL(f"{chosen}, {each}").format(sql.SQL(table), sql.SQL(added))


# What is late and belongs to a workflow before the one that has the name now is added to that workflow's row, or gets
# one that is not the latest of its name.
_ADD_WORKFLOW = (
    sql.SQL(
        "WITH added AS (SELECT {given}),"
        " later AS (SELECT FROM workflow_result AS it, added WHERE it.tenant = added.tenant"
        " AND it.workflow = added.workflow AND it.latest AND it.began_at > added.over_at + {reused}),"
        " merged AS (UPDATE workflow_result AS before SET {into_before} FROM added WHERE EXISTS (SELECT FROM later)"
        " AND before.id = (SELECT it.id FROM workflow_result AS it, added WHERE it.tenant = added.tenant"
        " AND it.workflow = added.workflow AND NOT it.latest AND it.began_at <= added.over_at + {reused}"
        " AND {over_at} >= added.began_at - {reused} ORDER BY it.began_at DESC LIMIT 1)"
        " RETURNING before.id)"
        " INSERT INTO workflow_result ({columns}, latest) SELECT {columns}, NOT EXISTS (SELECT FROM later) FROM added"
        " WHERE NOT EXISTS (SELECT FROM merged)"
        " ON CONFLICT (tenant, workflow) WHERE latest DO UPDATE SET {into_latest}"
    )
    .format(
        given=sql.SQL(", ").join(
            sql.SQL("{}::{} AS {}").format(sql.Placeholder(), sql.SQL(kind), sql.Identifier(name))
            for name, kind in (*_WORKFLOW_COLUMNS.items(), ("over_at", "timestamptz"))
        ),
        reused=sql.Literal(REUSED_AFTER),
        over_at=sql.SQL(_OVER_AT.format("it.")),
        into_before=_merged("before", "added"),
        into_latest=_merged("workflow_result", "EXCLUDED"),
        columns=_names(_WORKFLOW_COLUMNS),
    )
    .as_string(None)
)  # once: psycopg would put it together at each call


def goodput_write(
    cursor: psycopg.Cursor[Any], records: Sequence[RequestRecord], cancelled: Sequence[WorkflowCancellation] = ()
) -> None:
    """Count records that are new; cancellations may be told again. Raises psycopg.Error."""
    minutes = _minutes([record for record in records if not record.workflow])
    workflows = _workflows([record for record in records if record.workflow], cancelled)
    # In the order of their keys, each done before the next, so that two writers cannot deadlock.
    if minutes:
        cursor.executemany(_ADD_MINUTE, [(*key, *minutes[key]) for key in sorted(minutes)])
    if not workflows:
        return
    with cursor.connection.pipeline():  # else each workflow would take two round trips
        for key in sorted(workflows):
            for statement, told in _statements(workflows[key]):
                cursor.execute(statement, told)


def workflow_cancelled_write(cursor: CursorWrapper, cancelled: WorkflowCancellation) -> None:
    """For a process that stores no records. Told again it changes nothing. Raises django.db.Error."""
    for each in _workflows([], [cancelled]).values():
        for statement, told in _statements(each):
            cursor.execute(statement, told)


def _statements(each: _Workflow) -> Iterator[tuple[str, tuple[Any, ...]]]:
    yield _LEAVE_OLD, (each.tenant, each.name, each.began_at - REUSED_AFTER)
    yield _ADD_WORKFLOW, (*each.row(), each.over_at)


def _minutes(records: Iterable[RequestRecord]) -> dict[tuple[datetime, str, str, str], list[int]]:
    sums: dict[tuple[datetime, str, str, str], list[int]] = {}
    for record in records:
        kind = type_of(record)
        if kind is RequestType.COMPOUND:  # refusals of workflows that it does not name: they are nobody's misses
            continue
        minute = _at(record.arrived_at).replace(second=0, microsecond=0)
        key = (minute, _text(record.tenant), _text(record.slo_class), kind.value)
        own = sums.setdefault(key, [0] * len(_MINUTE_COUNTS))
        for place, amount in enumerate(goodput_counts(record, kind)):
            own[place] += amount
    return sums


@dataclass(slots=True)
class _Workflow:
    """Sums over those requests of one workflow that are in a batch. `began_at`, `ended_at`: of the requests; without
    one from the workflow's own beginning to its cancellation."""

    tenant: str
    name: str
    slo_class: str
    began_at: datetime
    ended_at: datetime
    due_at: datetime | None = None
    cancelled_by: str = ""
    cancelled_at: datetime | None = None
    requests: int = 0
    failed: int = 0
    missed: int = 0
    cancelled: int = 0
    tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        arrived, ended = _at(record.arrived_at), _at(record.arrived_at + (record.e2e_s or 0.0))
        if arrived < self.began_at:
            self.began_at, self.slo_class = arrived, _text(record.slo_class)
        self.ended_at = max(self.ended_at, ended)
        self._due(_due_at(record))
        if found := _cancelled(record):
            self._cancelled(*found)
        cancelled, answered = record.counted_as == Outcome.CANCELLED, record.outcome == Outcome.OK
        self.requests += record.stands_for
        failed = not answered and not given_up(record.step_key, record.error_code)
        self.failed += record.stands_for if failed else 0
        self.cancelled += record.stands_for if cancelled else 0
        self.missed += 0 if cancelled or record.attained else record.stands_for
        # Without an attempt at an engine its answer is that of another request, which has counted it.
        self.tokens += record.prompt_tokens + record.output_tokens if answered and record.attempts else 0

    def cancel(self, cancellation: WorkflowCancellation) -> None:
        self._due(_at(cancellation.due_at))
        self._cancelled(cancellation.by, _at(cancellation.cancelled_at))

    def _due(self, at: datetime | None) -> None:
        self.due_at = min(filter(None, (self.due_at, at)), default=None)

    def _cancelled(self, by: str, at: datetime) -> None:
        if self.cancelled_at is None or at < self.cancelled_at:
            self.cancelled_by, self.cancelled_at = by, at

    @property
    def over_at(self) -> datetime:
        """As `_OVER_AT`."""
        end = min(filter(None, (self.due_at, self.cancelled_at)), default=self.ended_at)
        return max(self.ended_at, end)

    def row(self) -> tuple[Any, ...]:
        """As `_WORKFLOW_COLUMNS`."""
        times = (self.began_at, self.ended_at, self.due_at)
        counts = (self.requests, self.failed, self.missed, self.cancelled, self.tokens)
        cancelled = (self.cancelled_by, self.cancelled_at)
        return (self.tenant, self.name, self.slo_class, *times, *cancelled, *counts)


def _workflows(
    records: Iterable[RequestRecord], cancelled: Iterable[WorkflowCancellation]
) -> dict[tuple[str, str], _Workflow]:
    found: dict[tuple[str, str], _Workflow] = {}
    for record in records:
        key, at = (_text(record.tenant), _text(record.workflow, 120)), _at(record.arrived_at)
        if key not in found:
            found[key] = _Workflow(*key, _text(record.slo_class), at, at)
        found[key].add(record)
    for each in cancelled:
        if each.cancelled_at >= each.due_at:  # it has its result: it must get no row for this
            continue
        key = (_text(each.tenant), _text(each.workflow, 120))
        if key not in found:
            found[key] = _Workflow(*key, "", _at(each.began_at), _at(each.cancelled_at))
        found[key].cancel(each)
    return found


def _due_at(record: RequestRecord) -> datetime | None:
    """When its workflow is due, as its gateway found: `left_s` after the step `workflow`. None without a deadline."""
    step = next((step for step in record.decisions if step.get("kind") == "workflow"), None)
    left_s = None if step is None else step.get("figures", {}).get("left_s")
    return None if step is None or left_s is None else _at(record.arrived_at + (step.get("at") or 0.0) + left_s)


def _cancelled(record: RequestRecord) -> tuple[str, datetime] | None:
    """By whom (tenant or operator) and when its workflow was cancelled while it ran, as its gateway heard of it."""
    last = record.decisions[-1] if record.decisions else {}
    by = CANCELLED_BY.get(last.get("reason", "")) if last.get("kind") == "cancel" else None
    return None if by is None else (by, _at(record.arrived_at + last.get("at", record.e2e_s or 0.0)))


def _at(epoch_s: float) -> datetime:
    return datetime.fromtimestamp(epoch_s, UTC)


def _text(raw: str, length: int = 64) -> str:
    """As the record itself stores it: without NUL and lone surrogates, cut."""
    return raw.replace("\x00", "").encode("utf-8", "replace").decode()[:length]
