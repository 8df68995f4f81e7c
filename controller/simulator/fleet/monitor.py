"""Monitoring in a run: telemetry and progress for the scheduler, samples for the report."""

from __future__ import annotations

from typing import Protocol

from controller.core import events as ev
from controller.dispatch import Scheduler
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.fleet.disaggregation import KvTransfers
from controller.simulator.heap import EventHeap, EventKind
from controller.simulator.report.results import FleetSample, SimulationResult
from controller.simulator.settings import SimulationSettings


class MonitoredRun(Protocol):
    """What the monitor asks of the simulation."""

    cluster: Cluster
    scheduler: Scheduler
    kv: KvTransfers | None
    heap: EventHeap
    result: SimulationResult
    settings: SimulationSettings

    def tell(self, *events: ev.Event) -> None: ...


class RunMonitor:
    """Each of its looks schedules the next one."""

    def __init__(self, host: MonitoredRun) -> None:
        self._host = host

    def start(self) -> None:
        heap = self._host.heap
        heap.push(0.0, EventKind.TICK, self._telemetry)
        heap.push(self._host.settings.progress_s, EventKind.TICK, self._progress)
        heap.push(0.0, EventKind.TICK, self._sample)

    def _telemetry(self) -> None:
        host, now = self._host, self._host.heap.now
        news = [ev.Telemetry(instance.id, instance.load(now)) for instance in host.cluster]
        if host.settings.telemetry_delay_s:
            host.heap.push(now + host.settings.telemetry_delay_s, EventKind.TICK, lambda: host.tell(*news))
        else:
            host.tell(*news)
        host.heap.push(now + host.settings.telemetry_period_s, EventKind.TICK, self._telemetry)

    def _progress(self) -> None:
        host, now = self._host, self._host.heap.now
        for instance in host.cluster:
            host.tell(*(ev.Progress(name, tokens) for name, tokens in instance.produced(now)))
        host.heap.push(now + host.settings.progress_s, EventKind.TICK, self._progress)

    def _sample(self) -> None:
        host, now = self._host, self._host.heap.now
        engines = [instance.engine for instance in host.cluster]
        running = sum(len(engine.running) + engine.arrived_count for engine in engines)
        waiting = sum(engine.waiting_count for engine in engines)
        moving = host.kv.moving if host.kv is not None else 0
        host.result.samples.append(
            FleetSample(now, len(host.scheduler.queue()), waiting, running, len(engines), moving)
        )
        host.heap.push(now + host.settings.sample_s, EventKind.TICK, self._sample)
