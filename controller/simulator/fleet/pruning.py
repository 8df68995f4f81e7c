"""The coordinator of pruning in a run: the gateway's own reports and orders, on virtual time."""

from __future__ import annotations

from itertools import count

from controller.core import events as ev
from controller.dispatch import Scheduler
from controller.dispatch.queue_report import queue_report
from controller.flow.coordinator import Coordinated, Coordinator, CoordinatorConfig
from controller.simulator.fleet.run import FleetRun
from controller.simulator.heap import EventKind
from controller.simulator.settings import PruningSettings

VALID_S = 3.0  # three periods of reports


class Pruning:
    """Each of its looks schedules the next one."""

    def __init__(self, run: FleetRun, settings: PruningSettings) -> None:
        self._run = run
        self._settings = settings
        self._coordinator = Coordinator(CoordinatorConfig(drop_budget=settings.drop_budget))
        self._sequence = count(1)
        self._told = False  # whether orders that name requests may be in force

    def start(self) -> None:
        self._run.heap.push(0.0, EventKind.TICK, self._look)

    def _look(self) -> None:
        run, now = self._run, self._run.heap.now
        schedulers = [run.scheduler] if isinstance(run.scheduler, Scheduler) else run.scheduler.schedulers
        reports = [queue_report(each.dispatcher, str(number), now) for number, each in enumerate(schedulers)]
        if any(queue.waiting for report in reports for queue in report.queues):
            found = self._coordinator.decide(reports, now)
            if found.scavengers or self._told:
                orders = _orders(found, next(self._sequence), now + VALID_S)
                run.heap.push(now + self._settings.delay_s, EventKind.TICK, lambda: run.tell(orders))
            self._told = bool(found.scavengers)
        run.heap.push(now + self._settings.every_s, EventKind.TICK, self._look)


def _orders(found: Coordinated, sequence: int, expires_at: float) -> ev.Orders:
    return ev.Orders(
        sequence, expires_at, {name: (reason.instance, reason.behind_s) for name, reason in found.scavengers.items()}
    )
