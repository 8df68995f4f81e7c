"""Scaling in a simulation: the Scaler that runs in production, once a tick, on what the gateway would publish.

With prefill and decode on instances of their own each stage has a scaler of its own, on its own load, and one may give
an instance to the other (scale.role_changes). A new instance serves after its process is up, if it is not warm, and
the load time of its weights' source, and costs from the moment it is asked for; one that changes its role keeps its
weights and serves again when it is empty. A drained one stops when it is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from controller.core import events as ev
from controller.core.decisions import Decision
from controller.core.messages import QUEUE_PRESSURE_ROWS
from controller.core.types import Role
from controller.dispatch import StageDispatcher
from controller.scale import (
    Drain,
    FleetObservation,
    Member,
    ScaleAction,
    ScaleOut,
    Scaler,
    ScalerState,
    ScalingConfig,
    processing_rate,
)
from controller.scale.load import RATE_WINDOW_S
from controller.scale.role_changes import SwitchRole, role_change, spare_since
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.fleet.disaggregation import Handoff
from controller.simulator.fleet.presence import drain, end_drained, fleet_of
from controller.simulator.fleet.warm_pool import WarmPool
from controller.simulator.report.results import ScaledOut
from controller.simulator.settings import ElasticSettings

Looks = Mapping[Role, FleetObservation]


class Host(Protocol):
    """What scaling asks of the simulation."""

    cluster: Cluster
    dispatcher: StageDispatcher
    handoff: Handoff | None

    def tell_dispatcher(self, *events: ev.Event) -> None: ...

    def bring_up_later(self, name: str, at: float) -> None: ...


class Stage:
    """One role: its scaler's memory, and the windows behind its observation. `enters` and `leaves` are counted."""

    def __init__(self, config: ScalingConfig, enters: type, leaves: type) -> None:
        self.config = config
        self.role = Role(config.role)
        self.state = ScalerState()
        self.spare_since: float | None = None
        self._enters, self._leaves = enters, leaves
        self._entered: deque[float] = deque()
        self._left: deque[float] = deque()

    def heard(self, event: ev.Event, now: float) -> None:
        if type(event) is self._enters:
            self._entered.append(now)
        elif type(event) is self._leaves:
            self._left.append(now)

    def rates(self, now: float) -> tuple[float, float]:
        """Requests/s that came to the stage and that left it."""
        return _rate(self._entered, now), _rate(self._left, now)


class Elastic:
    """The scalers of a run."""

    def __init__(self, settings: ElasticSettings, host: Host) -> None:
        self.settings = settings
        self.decisions: list[Decision] = []
        self._host = host
        self._scaler = Scaler()
        self._switching: dict[str, str] = {}  # draining instances that come back in another role
        self.pool = WarmPool(settings.warm, settings.start_s, host.cluster)
        self._asked: dict[str, ScaledOut] = {}
        if settings.decode is None:
            self.stages = [Stage(settings.scaling, ev.Arrived, ev.Finished)]
        else:
            first, second = settings.scaling, settings.decode
            self.stages = [Stage(first, ev.Arrived, ev.FirstToken), Stage(second, ev.FirstToken, ev.Finished)]

    def scaled_out(self, now: float) -> list[ScaledOut]:
        """Instances that were added and serve by now, or did."""
        return [each for each in self._asked.values() if each.up_at <= now]

    def heard(self, events: Sequence[ev.Event], now: float) -> None:
        """All that the deciders were told."""
        for event in events:
            for stage in self.stages:
                stage.heard(event, now)

    def tick(self, now: float) -> None:
        self._end_drained(now)
        looks = {stage.role: self.observe(stage, now) for stage in self.stages}
        for stage in self.stages:
            stage.spare_since = spare_since(stage.spare_since, stage.config, looks[stage.role], now)
        for stage in self.stages:
            seen = looks[stage.role]
            config = self._bounded(stage, looks, now)
            stage.state, actions, decision = self._scaler.decide(config, stage.state, seen, now)
            if decision is not None:
                self.decisions.append(decision)
            self._act(stage, looks, actions, now)
        self.pool.look(now)

    def observe(self, stage: Stage, now: float) -> FleetObservation:
        entered, left = stage.rates(now)
        waits, queued = self._waiting(stage, now)
        look = FleetObservation(
            members=self._members(stage, now),
            age_s=0.0,
            period_s=stage.config.interval_s,
            wait_over_slo=waits,
            arrival_rate=entered,
            queued=queued,
        )
        return look.with_processing_rate(processing_rate(left, look.mean_utilisation, look.queued, entered))

    def _waiting(self, stage: Stage, now: float) -> tuple[float, int]:
        """Largest wait over its SLO, and how many wait, before the stage."""
        host = self._host
        if stage.role is Role.DECODE and host.handoff is not None:
            pressure = host.handoff.migrator.pressure(now).values()
        else:
            pressure = host.dispatcher.queue().pressure(QUEUE_PRESSURE_ROWS, now).values()
        return max((share for _, share in pressure), default=0.0), sum(queued for queued, _ in pressure)

    def _members(self, stage: Stage, now: float) -> tuple[Member, ...]:
        cluster, fleet = self._host.cluster, fleet_of(self._host, now)
        members = [Member(name, "starting") for name in cluster.starting if cluster.role_of(name) is stage.role]
        members += [Member(name, "starting") for name, role in self._switching.items() if role == stage.role]
        for instance in cluster:
            if instance.spec.role is stage.role and instance.id not in self._switching:
                known = fleet.get(instance.id)
                load = (known.utilisation, known.running + known.waiting) if known else (0.0, 0)
                members.append(Member(instance.id, "draining" if instance.id in cluster.draining else "ready", *load))
        return tuple(sorted(members, key=lambda member: member.id))

    # ---- acting ----------------------------------------------------------------------------------------------------

    def _bounded(self, stage: Stage, looks: Looks, now: float) -> ScalingConfig:
        """The stage may have what it has, what it may still start, and what the other stage can spare."""
        if self.settings.most is None:
            return stage.config
        used = len(self._host.cluster) + len(self._host.cluster.starting)
        free = max(0, self.settings.most - used)
        given = any(self._given(stage, looks, now))
        seen = looks[stage.role]
        count = len(seen.members) - len(seen.having("draining"))
        most = min(stage.config.max_instances, count + max(free, int(given)))
        return replace(stage.config, max_instances=max(1, most), min_instances=min(stage.config.min_instances, most))

    def _act(self, stage: Stage, looks: Looks, actions: Sequence[ScaleAction], now: float) -> None:
        cluster = self._host.cluster
        for action in actions:
            if isinstance(action, ScaleOut):
                for _ in range(action.instances):
                    self._one_more(stage, looks, now)
            elif action.instance_id in cluster.starting:
                cluster.give_up(action.instance_id, now)
                self._asked.pop(action.instance_id, None)
            elif isinstance(action, Drain):
                drain(self._host, action.instance_id)
            else:
                self._undrain(action.instance_id)

    def _given(self, stage: Stage, looks: Looks, now: float) -> Iterator[tuple[SwitchRole, Decision]]:
        """What other stages could give this one now."""
        for other in self.stages:
            if other is not stage:
                seen, load = looks[other.role], looks[stage.role].load
                found = role_change(other.config, seen, other.spare_since, stage.config, load, now)
                if found is not None:
                    yield found

    def _one_more(self, stage: Stage, looks: Looks, now: float) -> None:
        """From the other stage, else a new one."""
        for action, decision in self._given(stage, looks, now):
            self.decisions.append(decision)
            self._switch(action)
            return
        coming = self.pool.one_more(stage.role, now, self._load_s())
        self._asked[coming.id] = coming
        self._host.bring_up_later(coming.id, coming.up_at)

    def _load_s(self) -> float:
        source = self.settings.source
        return self.settings.load_s["disk" if source == "device" and not len(self._host.cluster) else source]

    def _switch(self, action: SwitchRole) -> None:
        self._switching[action.instance_id] = action.role
        drain(self._host, action.instance_id)

    def _undrain(self, instance_id: str) -> None:
        instance = self._host.cluster.get(instance_id)
        if instance is not None:
            self._host.cluster.draining.discard(instance_id)
            self._host.tell_dispatcher(ev.InstanceUp(instance.spec))

    def _end_drained(self, now: float) -> None:
        """What is empty stops, or comes back in its new role."""
        for name in end_drained(self._host, now, self._host.cluster.draining):
            role = self._switching.pop(name, None)
            if role is not None:
                again = self._host.cluster.ask_for_one_more(now, Role(role))
                self._host.bring_up_later(again, now + self.settings.switch_s)


def _rate(times: deque[float], now: float) -> float:
    while times and times[0] < now - RATE_WINDOW_S:
        times.popleft()
    return len(times) / RATE_WINDOW_S
