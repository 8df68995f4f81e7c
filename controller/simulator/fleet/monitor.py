"""Monitoring in a run: telemetry and progress for the scheduler, samples for the report."""

from __future__ import annotations

from controller.core import events as ev
from controller.simulator.fleet.run import FleetRun
from controller.simulator.heap import EventKind
from controller.simulator.report.results import FleetSample


class RunMonitor:
    """Each of its looks schedules the next one."""

    def __init__(self, run: FleetRun) -> None:
        self._run = run

    def start(self) -> None:
        heap = self._run.heap
        heap.push(0.0, EventKind.TICK, self._telemetry)
        heap.push(self._run.settings.progress_s, EventKind.TICK, self._progress)
        heap.push(0.0, EventKind.TICK, self._sample)

    def _telemetry(self) -> None:
        run, now = self._run, self._run.heap.now
        news = [ev.Telemetry(instance.id, instance.load(now)) for instance in run.cluster]
        if run.settings.telemetry_delay_s:
            run.heap.push(now + run.settings.telemetry_delay_s, EventKind.TICK, lambda: run.tell(*news))
        else:
            run.tell(*news)
        run.heap.push(now + run.settings.telemetry_period_s, EventKind.TICK, self._telemetry)

    def _progress(self) -> None:
        run, now = self._run, self._run.heap.now
        for instance in run.cluster:
            run.tell(*(ev.Progress(name, tokens) for name, tokens in instance.produced(now)))
        run.heap.push(now + run.settings.progress_s, EventKind.TICK, self._progress)

    def _sample(self) -> None:
        run, now = self._run, self._run.heap.now
        engines = [instance.engine for instance in run.cluster]
        running = sum(len(engine.running) + engine.arrived_count for engine in engines)
        waiting = sum(engine.waiting_count for engine in engines)
        moving = run.kv.moving if run.kv is not None else 0
        run.result.samples.append(FleetSample(now, len(run.scheduler.queue()), waiting, running, len(engines), moving))
        run.heap.push(now + run.settings.sample_s, EventKind.TICK, self._sample)
