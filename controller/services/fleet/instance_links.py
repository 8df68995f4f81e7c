"""Links between instances: rows that follow the reports of engines, opened and closed as instances come and go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from controller.core.kv_links import LinkReport, LinkState
from controller.models import Decision, Instance, InstanceLink, Link
from controller.services.actors import Actor
from controller.services.decisions import decision_record

LINKS = Actor.job("links")
FIGURES_EVERY = timedelta(seconds=5)  # counters are stored no more often than this
TOLD_AFTER = timedelta(seconds=3)  # down for longer is a decision; an instance that ends takes its links along
ERROR_LENGTH = 1_000
_FOLLOWS = (
    "state", "since", "bandwidth_bytes_s", "latency_s", "bytes", "transfers", "failures", "last_error", "error_at",
    "observed_at", "closed_at",
)  # fmt: skip
Pair = tuple[str, str]  # source, target


def instance_links_observe(
    *,
    heard: Mapping[str, Sequence[LinkReport]],
    silent: Iterable[str] = (),
    models: Mapping[str, str],
    at: datetime | None = None,
) -> list[Decision]:
    """Store one round of reports. `heard`: what each engine reports of the links over which it pulls; `silent`: engines
    that did not answer; `models`: by instance, of all that exist. Links of other instances are closed. Returns the
    decisions.

    Three queries if nothing changed, whatever the number of links.
    """
    at = at or timezone.now()
    silent = set(silent)
    reports = {
        (report.peer, target): report for target, said in heard.items() for report in said if report.peer in models
    }
    with transaction.atomic():
        rows = {(row.source, row.target): row for row in _open().select_for_update()}
        made = [_new(pair, models[pair[1]], at) for pair in reports if pair not in rows]
        if made:
            _describe(made)
            InstanceLink.objects.bulk_create(made, ignore_conflicts=True)
            rows |= {(row.source, row.target): row for row in _open().select_for_update()}
        changed, told = [], []
        for pair, row in rows.items():
            before = (row.state, row.since, row.observed_at)
            if _follow(row, pair, reports.get(pair), at, heard, silent):
                changed.append(row)
                told += _decisions(row, before, at)
        InstanceLink.objects.bulk_update(changed, _FOLLOWS, batch_size=500)
    return told


def instance_links_retain(*, days: int, now: datetime | None = None) -> int:
    """Delete links that were closed more than `days` days ago; returns their number."""
    if days < 1:
        raise ValueError("days: at least 1")
    limit = (now or timezone.now()) - timedelta(days=days)
    return InstanceLink.objects.filter(closed_at__lt=limit).delete()[0]


def _open() -> QuerySet[InstanceLink]:
    return InstanceLink.objects.filter(closed_at__isnull=True).order_by("pk")


def _new(pair: Pair, model: str, at: datetime) -> InstanceLink:
    source, target = pair
    return InstanceLink(
        source=source, target=target, model=model, since=at, created_at=at, observed_at=at - FIGURES_EVERY
    )


def _describe(made: Sequence[InstanceLink]) -> None:
    """The described link between hosts that each runs over: the widest one."""
    ends = {name for row in made for name in (row.source, row.target)}
    hosts = dict(Instance.objects.filter(pk__in=ends, host__isnull=False).values_list("pk", "host_id"))
    known: dict[tuple[int | None, int | None], int] = {
        (source, target): pk
        for source, target, pk in Link.objects.filter(source__in=set(hosts.values()))
        .order_by("bandwidth_bytes_s")
        .values_list("source_id", "target_id", "pk")
    }
    for row in made:
        row.link_id = known.get((hosts.get(row.source), hosts.get(row.target)))


def _follow(
    row: InstanceLink,
    pair: Pair,
    report: LinkReport | None,
    at: datetime,
    heard: Mapping[str, Sequence[LinkReport]],
    silent: set[str],
) -> bool:
    """Update the row to what was reported; True if it has to be stored."""
    if report is None:
        if pair[1] in silent:
            return _set(row, LinkState.DOWN, "its engine does not answer", at)
        row.closed_at = row.observed_at = at
        return True
    news = _set(row, report.state, report.last_error, at)
    row.bandwidth_bytes_s, row.latency_s = report.bandwidth_bytes_s, report.latency_s
    row.bytes, row.transfers, row.failures = report.bytes, report.transfers, report.failures
    if news or at - row.observed_at >= FIGURES_EVERY:
        row.observed_at = at
        return True
    return False


def _set(row: InstanceLink, state: LinkState, error: str, at: datetime) -> bool:
    error = error.replace("\x00", "")[:ERROR_LENGTH]
    news = row.state != state or row.last_error != error
    if row.state != state:
        row.state, row.since = state.value, at
    if row.last_error != error:
        row.last_error, row.error_at = error, at if error else row.error_at
    if state is LinkState.DOWN:  # stored each time, so that exactly one report passes the limit
        news, row.observed_at = True, at
    return news


def _decisions(row: InstanceLink, before: tuple[str, datetime, datetime], at: datetime) -> list[Decision]:
    """The decisions: a link has been down for long enough, or it is up again."""
    if row.closed_at is not None:
        return []
    state, since, looked = before
    if row.state == LinkState.DOWN and looked - row.since < TOLD_AFTER <= at - row.since:
        return [_decide(row, "link_down", "no_answer", {"error": row.last_error}, at)]
    if state == LinkState.DOWN and row.state != LinkState.DOWN and looked - since >= TOLD_AFTER:
        inputs = {"down_s": round((at - since).total_seconds(), 1), "error": row.last_error}
        return [_decide(row, "link_up", "answers_again", inputs, at)]
    return []


def _decide(row: InstanceLink, kind: str, reason: str, inputs: Mapping[str, object], at: datetime) -> Decision:
    return decision_record(
        actor=LINKS,
        kind=kind,
        subject_type="link",
        subject=str(row),
        reason=reason,
        inputs={"source": row.source, "target": row.target, **inputs},
        outcome={"state": row.state},
        at=at,
    )
