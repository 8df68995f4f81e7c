"""Scaling in a simulation: the production Scaler and capacity plan, on virtual time.

Once per tick each stage's Scaler gets what a gateway would publish about the stage, and
`controller.scale.capacity_plan` decides which instances come and go; this module adds no rule of its own. Disaggregated
prefill and decode each have a scaler with their own load.

A new instance serves after its process has started and its weights are loaded. A warm spare only loads its weights, and
gets the role of the stage that takes it. A sleeper keeps its id and its role and has to wake. An instance that changes
its role keeps its weights and serves again once it is empty. All of them cost from the moment they are ordered,
including warm spares and sleepers, until they are stopped. A drained instance stops once it is empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.messages import QUEUE_PRESSURE_ROWS, ModelTraffic
from controller.core.types import Part, Role
from controller.scale import (
    Drain,
    FleetObservation,
    Member,
    Scaler,
    ScalerMemory,
    ScalingConfig,
    Undrain,
    processing_rate,
)
from controller.scale.capacity_plan import (
    CapacityPlan,
    LoadWeights,
    OtherStage,
    PutToSleep,
    StageCapacity,
    StartNew,
    WakeUp,
    nearest_spares,
    plan_capacity,
)
from controller.scale.role_changes import SwitchRole
from controller.scale.traffic import ModelRates, StageRates, model_traffic, stage_traffic
from controller.scale.warm_pool import Spare, refill, weight_source
from controller.simulator.fleet.presence import drain, end_drained, fleet_of
from controller.simulator.fleet.run import FleetRun
from controller.simulator.fleet.weight_loads import WeightLoads
from controller.simulator.heap import EventKind
from controller.simulator.report.results import ScaledOut
from controller.simulator.settings import ElasticSettings

Looks = Mapping[Role, FleetObservation]


class ScaledStage:
    """One role and the state of its scaler."""

    def __init__(self, config: ScalingConfig) -> None:
        self.config = config
        self.role = Role(config.role)
        self.state = ScalerMemory()


class Elastic:
    """The scalers of a run, with its warm spares and sleepers."""

    def __init__(self, settings: ElasticSettings, run: FleetRun) -> None:
        self.settings = settings
        self.decisions: list[Decision] = []
        self._run = run
        self._scaler = Scaler()
        self._switching: dict[str, str] = {}  # draining instances that will change their role
        self._removed: set[str] = set()  # those of them that will be stopped instead
        self._stopped: dict[str, Role] = {}  # that a scaler removed
        self._falling_asleep: dict[str, int] = {}  # draining instances that will sleep, with their level
        self._asked: dict[str, ScaledOut] = {}  # `up_at` is infinite while its weights move
        self._loads = WeightLoads(settings, run, self._loaded)
        self.stages = [ScaledStage(each) for each in (settings.scaling, settings.decode) if each is not None]
        self._arrived, self._finished, self._rates = ModelRates(), ModelRates(), StageRates()
        self._models: dict[str, str] = {}  # by open request
        self._decoding: set[str] = set()  # prefilled requests that have not ended

    def start(self) -> None:
        """Fill the warm pool: it is full when the run begins, and its spares are ready. Tell that requests may wait for
        an instance that a scaler will start."""
        if any(stage.role is not Role.DECODE for stage in self.stages):
            for model in sorted({each.model for each in self._run.settings.instances}):
                self._run.joins.on_demand(model)
        for _ in range(self.settings.warm):
            self._run.cluster.keep_warm(0.0, ready_at=0.0)

    def scaled_out(self, now: float) -> list[ScaledOut]:
        """Instances that were added and have served by now."""
        return [each for each in self._asked.values() if each.up_at <= now]

    def count(self, events: Sequence[ev.Event], now: float) -> None:
        """Count the events that the scheduler gets."""
        for event in events:
            match event:
                case ev.Arrived(request):
                    self._models[request.id] = request.model
                    self._arrived.tick(request.model, now)
                case ev.PrefillDone(request):
                    self._decoding.add(request.id)
                    self._rates.prefilled(request.model, now)
                case ev.Finished(request_id) if request_id in self._models:
                    model = self._models.pop(request_id)
                    self._finished.tick(model, now)
                    if request_id in self._decoding:
                        self._decoding.remove(request_id)
                        self._rates.decoded(model, now)

    def sent(self, send: ev.Send, now: float) -> None:
        self._rates.sent(send.request.model, now, prefill=send.part is not Part.WHOLE)

    def tick(self, now: float) -> None:
        self._end_drained(now)
        looks, decided = self._looks(now), False
        for stage in self.stages:
            capacity = self._capacity(stage, looks, now)
            look = capacity.observation(now)
            stage.state, actions, decision = self._scaler.decide(stage.config, stage.state, look, now)
            if decision is None:
                continue
            decided = True
            plan = plan_capacity(capacity, actions, now)
            self.decisions.append(_recorded(decision, plan, self._carry_out(stage, plan, now)))
            if plan.role_change is not None:
                self.decisions.append(plan.role_change)
            looks = self._looks(now)  # the next stage must not count on what this one took
        if not decided:  # as the service: never at the look that took from the pool
            self._refill_pool(now)

    def _looks(self, now: float) -> Looks:
        return {stage.role: self.observe(stage, now) for stage in self.stages}

    def observe(self, stage: ScaledStage, now: float) -> FleetObservation:
        seen = [stage_traffic(model, stage.role) for model in self._traffic(now).values()]
        entered, left = (sum(each[key] for each in seen) for key in ("arrival_rate", "service_rate"))
        waits = max((each["wait_over_slo"] for each in seen), default=0.0)
        look = FleetObservation(
            members=self._members(stage, now),
            age_s=0.0,
            period_s=stage.config.interval_s,
            wait_over_slo=waits,
            arrival_rate=entered,
            queued=sum(each["queued"] for each in seen),
            taken=self._takes_requests(),
            counted_s=now,
        )
        return look.with_processing_rate(processing_rate(left, look.mean_utilisation, look.queued, entered))

    def _takes_requests(self) -> bool:
        """Whether a request would be accepted: by a collocated or a prefill instance (a gateway's *capacity*)."""
        cluster = self._run.cluster
        return any(each.spec.role != Role.DECODE and each.id not in cluster.draining for each in cluster)

    def _traffic(self, now: float) -> dict[str, ModelTraffic]:
        """By model, as a gateway publishes it."""
        scheduler = self._run.scheduler
        moving = scheduler.decode_pressure(now) if self._run.kv is not None else {}
        waiting = scheduler.queue().pressure(QUEUE_PRESSURE_ROWS, now)
        return model_traffic(now, self._arrived.rates(now), self._finished.rates(now), self._rates, waiting, moving)

    def _members(self, stage: ScaledStage, now: float) -> tuple[Member, ...]:
        cluster, fleet = self._run.cluster, fleet_of(self._run, now)
        members = [Member(name, "starting") for name in cluster.starting if cluster.role_of(name) is stage.role]
        switching = [name for name, role in self._switching.items() if role == stage.role]
        members += [Member(name, "draining" if name in self._removed else "starting") for name in switching]
        elsewhere = self._switching.keys() | self._falling_asleep.keys()
        for instance in cluster:
            if instance.spec.role is stage.role and instance.id not in elsewhere:
                known = fleet.get(instance.id)
                state = "draining" if instance.id in cluster.draining else "ready"
                if known is None:
                    members.append(Member(instance.id, state))
                else:
                    load = known.utilisation, known.outstanding
                    members.append(Member(instance.id, state, *load, needed=known.needed, speed=known.speed))
        return tuple(sorted(members, key=lambda member: member.id))

    # ---- what there is ---------------------------------------------------------------------------------------------

    def _capacity(self, stage: ScaledStage, looks: Looks, now: float) -> StageCapacity:
        """The stage, and everything that its next instances can come from."""
        seen = looks[stage.role]
        others = [OtherStage(other.config, looks[other.role], other.state) for other in self.stages]
        spares, room = self._sources([*self._warm(now, seen), *self._sleepers(stage, seen, now)])
        stopped = [
            name for name, role in self._stopped.items() if role is stage.role and not self._run.cluster.has_like(name)
        ]
        wanted = self._run.scheduler.wanted(now) if stopped and room != 0 else set()
        return StageCapacity(
            config=stage.config,
            seen=seen,
            spares=spares,
            other=next((other for other in others if other.config is not stage.config), None),
            room=room,
            sleepable=frozenset(member.id for member in seen.having("ready")),
            sleep_level=self.settings.sleep_level,
            start_s=self.settings.start_s + self._load_s() if self.settings.start_s else None,
            gone=tuple(name for name in reversed(stopped) if name in wanted),
        )

    def _sources(self, spares: list[Spare]) -> tuple[tuple[Spare, ...], int | None]:
        """The spares and the number of new processes that can be used so that at most `most` instances serve."""
        if self.settings.most is None:
            return tuple(spares), None
        left = max(0, self.settings.most - len(self._run.cluster) - len(self._run.cluster.starting))
        usable = tuple(nearest_spares(spares, left))
        return usable, left - len(usable)

    def _warm(self, now: float, seen: FleetObservation) -> list[Spare]:
        """The warm spares. They have no role yet, so all stages share one pool."""
        source = self._weight_source(0, seen)
        warm = self._run.cluster.warm.items()
        return [Spare(name, each.ready_at <= now, each.since, source=source) for name, each in warm]

    def _sleepers(self, stage: ScaledStage, seen: FleetObservation, now: float) -> list[Spare]:
        cluster = self._run.cluster
        asleep = {name: each for name, each in cluster.asleep.items() if cluster.role_of(name) is stage.role}
        wanted = self._run.scheduler.wanted(now) if asleep else set()
        return [
            Spare(
                name,
                True,
                each.since,
                source=self._weight_source(each.level, seen),
                sleep_level=each.level,
                needed=name in wanted,
            )
            for name, each in asleep.items()
        ]

    def _weight_source(self, level: int, seen: FleetObservation) -> int:
        copies, engine_ready = self.settings.source == "device", bool(seen.having("ready"))
        return weight_source(sleep_level=level, copies=copies, engine_ready=engine_ready)

    # ---- carrying out a plan ---------------------------------------------------------------------------------------

    def _carry_out(self, stage: ScaledStage, plan: CapacityPlan, now: float) -> list[str]:
        """Carry out the plan; returns the ids of new processes."""
        cluster, new = self._run.cluster, []
        for step in plan.steps:
            match step:
                case SwitchRole():
                    self._switch_role(stage, step, plan)
                case WakeUp():
                    cluster.wake(step.instance_id, now)
                    woken = ScaledOut(step.instance_id, now, now + self._wake_s(step.sleep_level), True, True)
                    self._coming(woken, loads=step.sleep_level > 1 and self.settings.wake_s is None)
                case LoadWeights():
                    cluster.load(step.instance_id, stage.role)
                    self._coming(ScaledOut(step.instance_id, now, now + self._load_s(), warm=True), loads=True)
                case StartNew():
                    new.append(cluster.ask_for_one_more(now, stage.role, step.like))
                    started = ScaledOut(new[-1], now, now + self.settings.start_s + self._load_s(), warm=False)
                    self._coming(started, loads=True, wait_s=self.settings.start_s)
                case Undrain() if step.instance_id in self._switching:
                    self._removed.discard(step.instance_id)
                case Undrain():
                    self._undrain(step.instance_id)
                case Drain() if step.instance_id in self._switching:
                    self._removed.add(step.instance_id)
                case Drain() if step.instance_id in cluster.starting:
                    cluster.give_up(step.instance_id, now)
                    self._loads.cancel(step.instance_id)
                    self._run.joins.came(step.instance_id)
                    self._asked.pop(step.instance_id, None)
                case PutToSleep():
                    self._falling_asleep[step.instance_id] = step.sleep_level
                    drain(self._run, step.instance_id)
                case Drain():
                    drain(self._run, step.instance_id)
        return new

    def _switch_role(self, stage: ScaledStage, step: SwitchRole, plan: CapacityPlan) -> None:
        self._switching[step.instance_id] = step.role
        drain(self._run, step.instance_id)
        for other in self.stages:
            if other is not stage and plan.giving is not None:
                other.state = plan.giving

    def _coming(self, instance: ScaledOut, loads: bool, wait_s: float = 0.0) -> None:
        """`loads`: it serves once it has its weights, which it loads after `wait_s`, and at `up_at` only if nothing is
        in their way."""
        if not (loads and self._loads.moves):
            self._asked[instance.id] = instance
            self._bring_up_later(instance.id, instance.up_at)
            return
        self._asked[instance.id] = instance._replace(up_at=math.inf)
        self._awaited(instance.id, instance.up_at)
        heap = self._run.heap
        heap.push(heap.now + wait_s, EventKind.FAILURE, partial(self._loads.begin, instance.id))

    def _loaded(self, name: str) -> None:
        if name in self._asked:
            self._asked[name] = self._asked[name]._replace(up_at=self._run.heap.now)
        self._run.bring_up(name)

    def _bring_up_later(self, name: str, at: float) -> None:
        self._awaited(name, at)
        self._run.bring_up_later(name, at)

    def _awaited(self, name: str, at: float) -> None:
        """It serves at `at`. Gateways know so from its order: without an instance, requests wait for it."""
        cluster = self._run.cluster
        if cluster.role_of(name) is not Role.DECODE:
            self._run.joins.awaited(name, cluster.model_of(name), at, predicted=True)

    def _load_s(self) -> float:
        source = self.settings.source
        return self.settings.load_s["disk" if source == "device" and not len(self._run.cluster) else source]

    def _wake_s(self, level: int) -> float:
        """Seconds to wake: level 1 reads the copy in host memory; level 2 loads its weights like any other instance."""
        if self.settings.wake_s is not None:
            return self.settings.wake_s
        return self.settings.load_s["host"] if level == 1 else self._load_s()

    def _undrain(self, instance_id: str) -> None:
        instance = self._run.cluster.get(instance_id)
        if instance is not None:
            self._run.cluster.draining.discard(instance_id)
            self._run.tell(ev.InstanceUp(instance.spec))

    def _end_drained(self, now: float) -> None:
        """An empty instance stops, falls asleep, or starts again in its new role. One that failed does none of it."""
        for name in [name for name in (*self._switching, *self._falling_asleep) if self._run.cluster.get(name) is None]:
            self._switching.pop(name, None)
            self._falling_asleep.pop(name, None)
            self._removed.discard(name)
        for name in end_drained(self._run, now, self._run.cluster.draining, self._falling_asleep):
            self._falling_asleep.pop(name, None)
            role = self._switching.pop(name, None)
            if name not in self._run.cluster.asleep and (role is None or name in self._removed):
                self._stopped[name] = Role(self._run.cluster.role_of(name))
            if role is not None and name not in self._removed:
                again = self._run.cluster.ask_for_one_more(now, Role(role))
                self._bring_up_later(again, now + self.settings.switch_s)
            self._removed.discard(name)

    def _refill_pool(self, now: float) -> None:
        """Start or stop warm spares until there are `warm`; none is started while weights load or an engine wakes."""
        cluster = self._run.cluster
        spares = [Spare(name, each.ready_at <= now, each.since) for name, each in cluster.warm.items()]
        coming = [self._asked[name] for name in cluster.starting if name in self._asked]
        loading = any(each.warm or each.woken for each in coming)
        change = refill(spares, self.settings.warm, room=None, busy=loading)
        for _ in range(change.start):
            cluster.keep_warm(now, ready_at=now + self.settings.start_s)
        for name in change.stop:
            cluster.give_up(name, now)


def _recorded(decision: Decision, plan: CapacityPlan, new_ids: Sequence[str]) -> Decision:
    """The decision with its outcome as further figures, under the keys of a stored Decision's outcome.

    Ids are joined by commas.
    """
    found: dict[str, Figure] = {
        name: value["instance"] if name == "switched" else ", ".join(value)
        for name, value in plan.outcome(new_ids).items()
    }
    return decision._replace(figures={**decision.figures, **found})
