"""The coordinator of pruning in a run: the gateway's own reports and orders, on virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import count

from controller.core import events as ev
from controller.core.pruning import OpenKv
from controller.dispatch import Scheduler
from controller.dispatch.queue_report import queue_report
from controller.flow.coordinator import Coordinated, Coordinator, CoordinatorConfig
from controller.flow.scheduler import OrderSent
from controller.simulator.fleet.run import FleetRun
from controller.simulator.heap import EventKind
from controller.simulator.settings import PruningSettings

VALID_S = 3.0  # three periods of reports
DAEMONS_S = 0.25  # between


class Pruning:
    """Each of its looks schedules the next one."""

    def __init__(self, run: FleetRun, settings: PruningSettings) -> None:
        self._run = run
        self._settings = settings
        self._coordinator = Coordinator(CoordinatorConfig(drop_budget=settings.drop_budget))
        self._sequence = count(1)
        self._open_kv: Mapping[str, OpenKv] | None = None  # as daemons reported it last
        self._asked_at = 0.0
        self._told = False  # whether orders that name requests may be in force

    def start(self) -> None:
        self._run.heap.push(0.0, EventKind.TICK, self._look)

    def _look(self) -> None:
        run, now = self._run, self._run.heap.now
        schedulers = [run.scheduler] if isinstance(run.scheduler, Scheduler) else run.scheduler.schedulers
        reports = [queue_report(each, str(number), now) for number, each in enumerate(schedulers)]
        if any(report.waits for report in reports):
            if now >= self._asked_at:
                self._open_kv, self._asked_at = run.links.network.open_kv(now), now + DAEMONS_S
            found = self._coordinator.decide(reports, now, self._open_kv)
            if found.scavengers or self._told:
                orders = _orders(found, next(self._sequence), now + VALID_S)
                run.heap.push(now + self._settings.delay_s, EventKind.TICK, partial(self._obey, orders))
            self._told = bool(found.scavengers)
        run.heap.push(now + self._settings.every_s, EventKind.TICK, self._look)

    def _obey(self, orders: ev.Orders) -> None:
        """Gateways and daemons have them."""
        self._run.tell(orders)
        self._run.links.obey(OrderSent(orders.sequence, (), frozenset(orders.scavengers), orders.expires_at))


def _orders(found: Coordinated, sequence: int, expires_at: float) -> ev.Orders:
    return ev.Orders(
        sequence, expires_at, {name: (reason.instance, reason.behind_s) for name, reason in found.scavengers.items()}
    )
