"""The capacity plan: where a stage's next instances come from, and what becomes of those that it can do without.

The Scaler (`controller.scale.scaler`) decides how many instances a stage needs. This module decides which ones, in one
order of preference: what can serve soonest comes first.

    an instance comes from                    step           it waits for
    ----------------------------------------  -------------  -----------------------------------------------
    1. the stage's own draining instances     Undrain        nothing (named by the Scaler, free of cool-down)
    2. the other stage, if it can spare one   SwitchRole     its engine, if that must be told (HyperFlexis sec. 6)
    3. sleepers and warm spares, the nearest  WakeUp,        its weights (HyperFlexis sec. 6, Fast Scaling, for
       weights first: a copy in host memory,  LoadWeights    warm spares; sleepers are ours)
       another engine's memory, the disk
    4. a new process                          StartNew       the process, then its weights (HyperFlexis Alg. 3)

A sleeper that recent requests need (`Spare.needed`) comes before all others, and before the other stage. Where they
need an instance that was stopped, the next new process is like that one. It comes first if it is why one was asked for.

An instance that the stage can do without is put to sleep (`PutToSleep`) where the policy has a sleep level and the
engine can sleep, so that it is third in this order at the next rise; otherwise it is drained and stopped (`Drain`).

The service (`controller.services.fleet.scaling`) and the simulator carry out these plans and store the scaler memory
that the plan returns for a stage that gave an instance. Neither has an order or a bound of its own, so what is
simulated is what serves. The warm pool is refilled between scale-outs (`controller.scale.warm_pool`).
Cost: O(spares log spares + instances).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from controller.core.decisions import Decision
from controller.scale.config import ScalingConfig
from controller.scale.load import FleetObservation
from controller.scale.role_changes import SwitchRole, role_change
from controller.scale.scaler import Drain, ScaleAction, ScaleOut, ScalerMemory, Undrain
from controller.scale.warm_pool import Spare

# Why nothing can be added.
NO_DEVICE, NOTHING_TO_START, TEMPLATE_PAUSED = "no_device", "nothing_to_start", "template_paused"


class WakeUp(NamedTuple):
    """Wake the sleeper; it brings its weights back from its `sleep_level`."""

    instance_id: str
    sleep_level: int


class LoadWeights(NamedTuple):
    """Give the warm spare its weights."""

    instance_id: str


class StartNew(NamedTuple):
    """Start one new process. Whoever carries out the plan chooses its id. `like`: the id of a stopped instance whose
    settings it gets; "": those of the stage's pattern."""

    like: str = ""


class PutToSleep(NamedTuple):
    """Send nothing new there, and have it sleep at `sleep_level` once it is empty."""

    instance_id: str
    sleep_level: int


Step = Undrain | SwitchRole | WakeUp | LoadWeights | StartNew | PutToSleep | Drain


class OtherStage(NamedTuple):
    """The decode stage beside a prefill stage, or the other way round: its bounds, what was seen of it, and the memory
    of its scaler."""

    config: ScalingConfig
    seen: FleetObservation
    memory: ScalerMemory


@dataclass(frozen=True, slots=True)
class StageCapacity:
    """One stage of a model, and everything that its next instances can come from.

    `seen`: its instances that serve, start or drain. `spares`: its sleepers and warm spares. `other`: None where the
    model is collocated, or the other stage has no policy. `pattern`: whether there is an instance whose settings a new
    one can get, and `without_pattern` why there is none. `room`: how many processes the free devices allow; None: any
    number. `gone`: ids of instances that were stopped, that recent requests need, and like which one can be started
    now. `start_s`: expected seconds of a new process until it serves, from the last ones; None: not known.
    `sleepable`: ids of its instances that can be put to sleep. `sleep_level`: level at which the policy puts to
    sleep what it can do without; 0: it stops them.
    """

    config: ScalingConfig
    seen: FleetObservation
    spares: tuple[Spare, ...] = ()
    other: OtherStage | None = None
    pattern: bool = True
    without_pattern: str = NOTHING_TO_START
    room: int | None = 0
    sleepable: frozenset[str] = frozenset()
    sleep_level: int = 0
    start_s: float | None = None
    gone: tuple[str, ...] = ()

    def role_change(self, now: float) -> tuple[SwitchRole, Decision] | None:
        """The instance that the other stage can give now, with its Decision."""
        if self.other is None:
            return None
        config, seen, memory = self.other
        return role_change(config, seen, memory.spare_since, self.config, self.seen.load, now)

    def can_add(self, now: float) -> bool:
        """Whether any source could give an instance now. Where none can, the Scaler holds."""
        starts = (self.pattern and self.room != 0) or bool(self.gone)
        return starts or any(spare.ready for spare in self.spares) or self.role_change(now) is not None

    @property
    def replaced_after_s(self) -> float | None:
        """Expected seconds until another instance would serve in place of a stopped one. None: not known, or a spare or
        what went to sleep serves sooner."""
        sleeps = self.sleep_level > 0 and bool(self.sleepable)
        return None if sleeps or any(spare.ready for spare in self.spares) else self.start_s

    def observation(self, now: float) -> FleetObservation:
        """What the Scaler judges: what was seen, whether an instance could be added and, if not, why, and how long that
        would take."""
        held_by = NO_DEVICE if self.pattern else self.without_pattern
        return replace(
            self.seen,
            startable=self.can_add(now),
            held_by=held_by,
            start_s=self.replaced_after_s,
            needed_asleep=self.needed_asleep,
            needed_stopped=bool(self.gone),
        )

    @property
    def needed_asleep(self) -> bool:
        """Whether one of its sleepers could be woken now that recent requests need."""
        return any(spare.needed and spare.ready for spare in self.spares)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Steps in the order in which they are carried out. `role_change`: the Decision of its `SwitchRole`, if any;
    `giving`: the memory that the other stage's scaler has from then on."""

    steps: tuple[Step, ...] = ()
    role_change: Decision | None = None
    giving: ScalerMemory | None = None

    @property
    def new(self) -> int:
        """How many new processes it starts."""
        return sum(isinstance(step, StartNew) for step in self.steps)

    def outcome(self, new_ids: Sequence[str]) -> dict[str, Any]:
        """What the Decision records; a key is absent where there is nothing to say. `new_ids`: of the new processes.

        `started`: all instances that will serve soon; `like`: stopped instances whose settings new ones get;
        `woken`: those that slept, and at which level;
        `switched`: the instance of the other stage and its role there; `asleep`: those that go to sleep.
        """
        woken = {step.instance_id: {"level": step.sleep_level} for step in self.steps if isinstance(step, WakeUp)}
        coming = [step.instance_id for step in self.steps if isinstance(step, WakeUp | LoadWeights)]
        asleep = [step.instance_id for step in self.steps if isinstance(step, PutToSleep)]
        like = [step.like for step in self.steps if isinstance(step, StartNew) and step.like]
        found = {"started": [*coming, *new_ids], "like": like, "woken": woken, "asleep": asleep}
        outcome: dict[str, Any] = {name: value for name, value in found.items() if value}
        if self.role_change is not None:
            figures = self.role_change.figures
            outcome["switched"] = {"instance": figures["instance"], "from": figures["from"]}
        return outcome


def plan_capacity(stage: StageCapacity, decided: Iterable[ScaleAction], now: float) -> CapacityPlan:
    """The steps that carry out what the Scaler decided for the stage.

    Fewer instances come than were asked for where all sources together have too few; the Scaler asks again at a later
    tick. The other stage gives one at most: it is judged again once that change has shown.
    """
    actions = list(decided)
    asked = sum(action.instances for action in actions if isinstance(action, ScaleOut))
    kept = [action for action in actions if isinstance(action, Undrain)]
    first = [StartNew(stage.gone[0])] if any(isinstance(each, ScaleOut) and each.needed for each in actions) else []
    asked -= len(first)
    change = stage.role_change(now) if asked and not stage.needed_asleep else None
    switched = [] if change is None else [change[0]]
    spares = _spares(stage, asked - len(switched))
    new = first or _new_processes(stage, asked - len(switched) - len(spares))
    leaving = [_leave(stage, action) for action in actions if isinstance(action, Drain)]
    steps = (*kept, *switched, *spares, *new, *leaving)
    if change is None or stage.other is None:
        return CapacityPlan(steps)
    return CapacityPlan(steps, change[1], stage.other.memory.after_giving(now))


def nearest_spares(spares: Iterable[Spare], instances: int) -> list[Spare]:
    """At most `instances` spares that are ready: those that are needed, then the nearest weights, then those that have
    waited longest."""
    able = (spare for spare in spares if spare.ready)
    ready = sorted(able, key=lambda each: (not each.needed, each.source, each.since, each.id))
    return ready[: max(0, instances)]


def _spares(stage: StageCapacity, wanted: int) -> list[Step]:
    return [
        WakeUp(spare.id, spare.sleep_level) if spare.sleep_level else LoadWeights(spare.id)
        for spare in nearest_spares(stage.spares, wanted)
    ]


def _new_processes(stage: StageCapacity, wanted: int) -> list[Step]:
    """The first of them like one that recent requests need; whether there is room for that and more is not known."""
    if wanted > 0 and stage.gone:
        return [StartNew(stage.gone[0])]
    room = stage.room if stage.pattern else 0
    return [StartNew()] * (wanted if room is None else min(wanted, room))


def _leave(stage: StageCapacity, action: Drain) -> Step:
    if stage.sleep_level and action.instance_id in stage.sleepable:
        return PutToSleep(action.instance_id, stage.sleep_level)
    return action
