"""The coordinator of pruning: which waiting requests gateways serve last, so that the others are in time (MFS, App. B).

Beat starts the task each second. It decides then, and again whenever a gateway reports a changed queue, at most twenty
times a second, until the next one starts. What it prunes and brings back becomes one decision for ten seconds; until
then Redis has a copy of it, with which the next process goes on if this one is killed.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from celery import shared_task

from controller.flow.coordinator import Coordinated, Coordinator, CoordinatorConfig
from controller.selectors.catalogue import flow_settings
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from workers import live
from workers.pruning import PERIOD_S, publish_orders, read_open_kv, read_reports, wait_for_news
from workers.tasks.heartbeat import heartbeat_send
from workers.tasks.names import PRUNING, PRUNING_PROCESS
from workers.tasks.untold import Untold

log = logging.getLogger(__name__)

LEASE = "pruning"
LEASE_S = 3.0
LOOK_S = 0.4  # longest wait for news in one command of Redis
LEAST_S = 0.05  # between two decisions
BATCH_S = 10.0  # what happened in so long a time becomes one decision
ACTOR = Actor.job("coordinator")

_untold = Untold()


@shared_task(name=PRUNING, soft_time_limit=6, time_limit=8)
def coordinate() -> None:
    row = flow_settings().first()
    budget = 0.0 if row is None else row.drop_budget
    ours, stale = False, _stale()
    try:
        if (budget or _untold.in_force or _untold.happened or _untold.seen_at is None) and (ours := _is_ours()):
            if budget:
                heartbeat_send(PRUNING_PROCESS)
                _work(Coordinator(CoordinatorConfig(drop_budget=budget, period_s=PERIOD_S)), PERIOD_S)
            elif _untold.in_force:
                _untold.take(Coordinated({}, 0, 0, ()))  # those in force expire
            ours = not _stale() or _is_ours()
    except live.LiveUnavailable as error:
        log.warning("nothing is pruned: %s", error)
        if not stale:
            _untold.seen_at = time.monotonic()  # nobody else coordinates without Redis
    _tell(budget, ours)


def _stale() -> bool:
    """Whether another process may have coordinated since this one did: it is new, or was stopped."""
    return _untold.seen_at is None or time.monotonic() - _untold.seen_at >= LEASE_S


def _is_ours() -> bool:
    """Whether this process coordinates now. If it is new, or was stopped, it goes on with what is stored."""
    if not live.lease(LEASE, f"{socket.gethostname()}:{os.getpid()}", LEASE_S):
        _untold.forget()
        return False
    if _stale():
        live.run(_untold.go_on())
    _untold.seen_at = time.monotonic()
    return True


def _tell(drop_budget: float, ours: bool) -> None:
    """Add what happened to the audit once it is old enough, and keep a copy of it until then."""
    if ours:
        _keep()
    if not _untold.happened:
        _untold.empty()
    elif time.time() - _untold.since >= BATCH_S:
        _record(drop_budget)
        _keep()


def _keep() -> None:
    try:
        live.run(_untold.keep())
    except live.LiveUnavailable as error:
        log.warning("what was pruned is not stored until it is in the audit: %s", error)


def _work(coordinator: Coordinator, for_s: float) -> None:
    until = time.monotonic() + for_s
    news = True  # at the start it looks without any
    while (left := until - time.monotonic()) > 0:
        if not news:
            news = live.run(wait_for_news(min(left, LOOK_S)))
            continue
        began = time.monotonic()
        decide(coordinator)
        news = False
        time.sleep(max(0.0, LEAST_S - (time.monotonic() - began)))


def decide(coordinator: Coordinator) -> Coordinated:
    """One decision on the newest reports. Orders are sent if they name a request, or if the last ones did."""
    reports, now = live.run(read_reports())
    ports = any(unit.port for report in reports for queue in report.queues for unit in queue.units)
    found = coordinator.decide(reports, now, live.run(read_open_kv()) if ports else None)
    if found.scavengers or _untold.in_force:
        live.run(publish_orders(found.scavengers, now, found.waiting, found.batches, found.gateways, found.order))
    _untold.take(found, {name for report in reports for name in report.ids()})
    return found


def _record(drop_budget: float) -> None:
    """Add the batch to the audit."""
    figures = _untold.figures(drop_budget)
    reason = "others_in_time" if _untold.pruned else "room_again" if _untold.returned else "orders_over"
    decision = decision_record(
        actor=ACTOR, kind="pruning", subject_type="flow_settings", subject="waiting requests", reason=reason,
        inputs=figures,
    )  # fmt: skip
    _untold.empty()
    live.announce(decision)
