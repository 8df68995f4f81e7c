"""Scaling in a simulation: the Scaler that runs in production, once a tick, on what the gateway would publish.

A new instance serves after the load time of its weights' source; it costs from the moment it is asked for. A drained
one stops when it is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from controller.core import events as ev
from controller.core.decisions import Decision
from controller.core.messages import QUEUE_ROWS_PUBLISHED
from controller.dispatch import StageDispatcher
from controller.scale import (
    Drain,
    FleetObservation,
    Member,
    ScaleAction,
    ScaleOut,
    Scaler,
    ScalerState,
    processing_rate,
)
from controller.scale.load import RATE_WINDOW_S
from controller.simulator.cluster import Cluster
from controller.simulator.settings import ElasticSettings


class Host(Protocol):
    """What scaling asks of the simulation."""

    cluster: Cluster
    dispatcher: StageDispatcher

    def tell_dispatcher(self, *events: ev.Event) -> None: ...

    def bring_up_later(self, name: str, at: float) -> None: ...


class Elastic:
    """State of the scaler between ticks, and the windows behind its observation."""

    def __init__(self, settings: ElasticSettings, host: Host) -> None:
        self.settings = settings
        self.decisions: list[Decision] = []
        self._host = host
        self._scaler = Scaler()
        self._state = ScalerState()
        self._arrived: deque[float] = deque()
        self._finished: deque[float] = deque()

    def arrived(self, now: float) -> None:
        self._arrived.append(now)

    def finished(self, now: float) -> None:
        self._finished.append(now)

    def tick(self, now: float) -> None:
        self._stop_drained(now)
        seen = self.observe(now)
        self._state, actions, decision = self._scaler.decide(self.settings.scaling, self._state, seen, now)
        if decision is not None:
            self.decisions.append(decision)
        self._act(actions, now)

    def observe(self, now: float) -> FleetObservation:
        look = FleetObservation(
            members=self._members(now),
            age_s=0.0,
            period_s=self.settings.scaling.interval_s,
            wait_over_slo=self._wait_over_slo(now),
            arrival_rate=_rate(self._arrived, now),
            queued=len(self._host.dispatcher.queue()),
        )
        finished = _rate(self._finished, now)
        return look.with_processing_rate(processing_rate(finished, look.mean_utilisation, look.queued))

    def _members(self, now: float) -> tuple[Member, ...]:
        cluster = self._host.cluster
        fleet = {state.id: state for state in self._host.dispatcher.fleet(now)}
        members = [Member(name, "starting") for name in cluster.starting]
        for instance in cluster:
            known = fleet.get(instance.id)
            load = (known.utilisation, known.running + known.waiting) if known else (0.0, 0)
            members.append(Member(instance.id, "draining" if instance.id in cluster.draining else "ready", *load))
        return tuple(sorted(members, key=lambda member: member.id))

    def _wait_over_slo(self, now: float) -> float:
        rows = self._host.dispatcher.queue().rows(QUEUE_ROWS_PUBLISHED, now)
        return max((row["waited_s"] / row["ttft_s"] for row in rows if row["ttft_s"] > 0), default=0.0)

    def _act(self, actions: Sequence[ScaleAction], now: float) -> None:
        cluster = self._host.cluster
        for action in actions:
            if isinstance(action, ScaleOut):
                for _ in range(action.instances):
                    self._host.bring_up_later(cluster.ask_for_one_more(now), now + self._load_s())
            elif action.instance_id in cluster.starting:
                cluster.give_up(action.instance_id, now)
            elif isinstance(action, Drain):
                cluster.draining.add(action.instance_id)
                self._host.tell_dispatcher(ev.InstanceDraining(action.instance_id))
            else:
                self._undrain(action.instance_id)

    def _load_s(self) -> float:
        source = self.settings.source
        return self.settings.load_s["disk" if source == "device" and not len(self._host.cluster) else source]

    def _undrain(self, instance_id: str) -> None:
        instance = self._host.cluster.get(instance_id)
        if instance is not None:
            self._host.cluster.draining.discard(instance_id)
            self._host.tell_dispatcher(ev.InstanceUp(instance.spec))

    def _stop_drained(self, now: float) -> None:
        cluster = self._host.cluster
        outstanding = {state.id: state.running + state.waiting for state in self._host.dispatcher.fleet(now)}
        for name in sorted(cluster.draining):
            instance = cluster.get(name)
            if instance is not None and instance.engine.idle and not outstanding.get(name):
                cluster.remove(instance, now)
                self._host.tell_dispatcher(ev.InstanceDown(name))


def _rate(times: deque[float], now: float) -> float:
    while times and times[0] < now - RATE_WINDOW_S:
        times.popleft()
    return len(times) / RATE_WINDOW_S
