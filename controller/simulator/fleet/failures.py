"""Instances that fail at times given in the settings, with all their requests, and their replacements."""

from __future__ import annotations

from functools import partial

from controller.core import events as ev
from controller.core.types import Role
from controller.simulator.fleet.run import FleetRun
from controller.simulator.fleet.weight_loads import WeightLoads
from controller.simulator.heap import EventKind
from controller.simulator.settings import Failure


class Failures:
    def __init__(self, run: FleetRun) -> None:
        self._run = run
        elastic = run.settings.elastic
        self._loads = WeightLoads(elastic, run, run.bring_up) if elastic is not None else None

    def start(self) -> None:
        for failure in self._run.settings.failures:
            self._run.heap.push(failure.at, EventKind.FAILURE, partial(self._die, failure))

    def _die(self, failure: Failure) -> None:
        run, now = self._run, self._run.heap.now
        instance = run.cluster.in_slot(failure.instance)
        if instance is None:
            return
        run.tell(ev.InstanceDown(instance.id, died=True))
        for in_flight in run.at_engine(instance.id):
            run.lost(in_flight, down=True)
        if run.kv is not None:
            run.kv.died(instance)
        run.cluster.remove(instance, now)
        run.links.died(instance.id)
        if failure.for_s is not None:
            replacement = run.cluster.ask(failure.instance, now + failure.for_s)
            if instance.spec.role is not Role.DECODE:
                run.joins.awaited(replacement, instance.spec.model, now)  # no gateway knows how long it will take
            self._come(replacement, now + failure.for_s)

    def _come(self, replacement: str, at: float) -> None:
        """Its process is there in time; if weights take the links, what it waits for last are those."""
        if self._loads is not None and self._loads.moves:
            self._loads.begin_in_time(replacement, at)
        else:
            self._run.bring_up_later(replacement, at)
