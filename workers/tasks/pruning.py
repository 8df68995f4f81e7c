"""The coordinator of pruning: which waiting requests gateways serve last, so that the others are in time (MFS, App. B).

Beat starts the task each second. It decides then, and again whenever a gateway reports a changed queue, at most twenty
times a second, until the next one starts. What it prunes and brings back becomes one decision for ten seconds.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from celery import shared_task

from controller.core.pruning import PruneReason
from controller.flow.coordinator import Coordinated, Coordinator, CoordinatorConfig
from controller.selectors.catalogue import flow_settings
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from workers import live
from workers.pruning import PERIOD_S, publish_orders, read_reports, wait_for_news
from workers.tasks.heartbeat import heartbeat_send
from workers.tasks.names import PRUNING, PRUNING_PROCESS

log = logging.getLogger(__name__)

LEASE = "pruning"
LEASE_S = 3.0
LOOK_S = 0.4  # longest wait for news in one command of Redis
LEAST_S = 0.05  # between two decisions
BATCH_S = 10.0  # what happened in so long a time becomes one decision
NAMED = 20  # requests that a decision names
ACTOR = Actor.job("coordinator")


@dataclass(slots=True)
class Untold:
    """What was pruned since the last decision in the audit, and what became of it: `returned` to its place, or `left`
    the reports, since it was sent, ended, or cannot be in time any more."""

    since: float = field(default_factory=time.monotonic)
    in_force: Mapping[str, PruneReason] = field(default_factory=dict)
    pruned: dict[str, PruneReason] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    most_waiting: int = 0
    gateways: set[str] = field(default_factory=set)

    def take(self, found: Coordinated, waiting: Collection[str] = ()) -> None:
        """`waiting`: requests that gateways report."""
        new = {name: reason for name, reason in found.scavengers.items() if name not in self.in_force}
        self.pruned |= new
        for name in self.in_force.keys() - found.scavengers.keys():
            (self.returned if name in waiting else self.left).add(name)
        self.in_force = found.scavengers
        self.most_waiting = max(self.most_waiting, found.waiting)
        self.gateways |= set(found.gateways)

    def figures(self, drop_budget: float) -> dict[str, object]:
        instances = Counter(reason.instance for reason in self.pruned.values())
        return {
            "pruned": len(self.pruned),
            "returned": len(self.returned),
            "left": len(self.left),
            "seconds": round(time.monotonic() - self.since, 1),
            "most_waiting": self.most_waiting,
            "gateways": sorted(self.gateways),
            "drop_budget": drop_budget,
            "by_instance": dict(sorted(instances.items())),
            "longest_behind_s": round(max((each.behind_s for each in self.pruned.values()), default=0.0), 3),
            "requests": sorted(self.pruned)[:NAMED],
        }

    def empty(self) -> None:
        self.since, self.most_waiting = time.monotonic(), 0
        self.pruned.clear()
        self.returned.clear()
        self.left.clear()
        self.gateways.clear()


_untold = Untold()


@shared_task(name=PRUNING, soft_time_limit=6, time_limit=8)
def coordinate() -> None:
    row = flow_settings().first()
    budget = 0.0 if row is None else row.drop_budget
    try:
        if budget and live.lease(LEASE, f"{socket.gethostname()}:{os.getpid()}", LEASE_S):
            heartbeat_send(PRUNING_PROCESS)
            _work(Coordinator(CoordinatorConfig(drop_budget=budget, period_s=PERIOD_S)), PERIOD_S)
        elif _untold.in_force:
            _untold.take(Coordinated({}, 0, 0, ()))  # those in force expire
    except live.LiveUnavailable as error:
        log.warning("nothing is pruned: %s", error)
    happened = _untold.pruned or _untold.returned or _untold.left
    if happened and time.monotonic() - _untold.since >= BATCH_S:
        _record(budget)
    elif not happened:
        _untold.empty()


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
    found = coordinator.decide(reports, now)
    if found.scavengers or _untold.in_force:
        live.run(publish_orders(found.scavengers, now, found.waiting, found.batches, found.gateways))
    _untold.take(found, {row.id for report in reports for queue in report.queues for row in queue.waiting})
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
