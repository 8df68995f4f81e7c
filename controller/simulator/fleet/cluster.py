"""The instances of a run: those up, starting, draining, asleep or warm, and the cost of each that ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from controller.core.types import Role
from controller.simulator.fleet.instance import SimulatedInstance, WatchStep
from controller.simulator.fleet.preemptive_instance import PreemptiveInstance
from controller.simulator.report.results import InstanceUse
from controller.simulator.settings import InstanceSettings, SimulationSettings


class Warm(NamedTuple):
    """A warm spare: its slot, when it was ordered and when it is ready."""

    slot: int
    since: float
    ready_at: float


class Asleep(NamedTuple):
    """A sleeping instance, which wakes under its own id: its slot, since when it sleeps, and its level."""

    slot: int
    since: float
    level: int


class Cluster:
    """Slots 0 to n - 1 are the settings' instances; later slots are copies of the first.

    A slot's second instance, after a failure, has an id of its own.
    """

    def __init__(self, settings: SimulationSettings) -> None:
        self._settings = settings
        self._live: dict[str, SimulatedInstance] = {}
        self.watch: WatchStep | None = None
        self._slots: dict[int, str] = {}
        self._gone: list[InstanceUse] = []
        self._occupants: Counter[int] = Counter()
        self.starting: dict[str, tuple[int, float]] = {}  # by id: slot, and when it was ordered
        self.warm: dict[str, Warm] = {}
        self.asleep: dict[str, Asleep] = {}
        self._kinds: dict[str, InstanceSettings] = {}  # by id, of instances that start, are warm, sleep or are up
        self._removed: dict[str, InstanceSettings] = {}  # the same of those that were up and are not there any more
        self.draining: set[str] = set()

    def __iter__(self) -> Iterator[SimulatedInstance]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def get(self, instance_id: str) -> SimulatedInstance | None:
        """The instance, or None if it is not up."""
        return self._live.get(instance_id)

    def in_slot(self, slot: int) -> SimulatedInstance | None:
        return self._live.get(self._slots.get(slot, ""))

    def slot_of(self, name: str) -> int | None:
        """The slot of an instance that starts or is up."""
        if name in self.starting:
            return self.starting[name][0]
        return next((slot for slot, each in self._slots.items() if each == name and name in self._live), None)

    def ask(self, slot: int, now: float, role: Role | None = None, like: str = "") -> str:
        """Order an instance in this slot; returns its id. It costs from now on, and is up after `bring_up`.

        A slot beyond the settings' own gets a copy of the removed instance `like`, of the first instance with the role,
        or of the first.
        """
        occupant = self._occupants[slot]
        self._occupants[slot] += 1
        name = f"engine-{slot}" + (f"-{occupant}" if occupant else "")
        self.starting[name] = (slot, now)
        kinds = self._settings.instances
        self._kinds[name] = kinds[slot] if slot < len(kinds) else self._removed.get(like) or self._alike(role)
        return name

    def ask_for_one_more(self, now: float, role: Role | None = None, like: str = "") -> str:
        last = max([*self._occupants, len(self._settings.instances) - 1])
        return self.ask(last + 1, now, role, like)

    def has_like(self, removed: str) -> bool:
        """Whether one with the settings of this removed instance is up or starts."""
        there = (*self._live, *self.starting)
        return any(self._kinds[name] == self._removed[removed] for name in there)

    def _alike(self, role: Role | None) -> InstanceSettings:
        kinds = self._settings.instances
        return next((kind for kind in kinds if role is None or kind.role == role), kinds[0])

    def keep_warm(self, now: float, ready_at: float) -> str:
        """Order one more warm spare; returns its id. It costs from now on."""
        name = self.ask_for_one_more(now)
        slot, since = self.starting.pop(name)
        self.warm[name] = Warm(slot, since, ready_at)
        return name

    def load(self, name: str, role: Role) -> None:
        """A warm spare gets a role and loads weights: from now on it starts."""
        warm = self.warm.pop(name)
        self.starting[name] = (warm.slot, warm.since)
        self._kinds[name] = self._alike(role)

    def begin_asleep(self, slot: int, level: int) -> str:
        """The slot's instance sleeps when the run begins; returns its id. It costs from then on."""
        name = self.ask(slot, 0.0)
        self.asleep[name] = Asleep(slot, self.starting.pop(name)[1], level)
        return name

    def put_to_sleep(self, instance: SimulatedInstance, now: float, level: int) -> None:
        """It keeps its id, slot and settings and goes on costing; what it did so far is recorded."""
        kind = self._kinds[instance.id]
        slot = next(slot for slot, name in self._slots.items() if name == instance.id)
        self.remove(instance, now)
        self._kinds[instance.id] = kind
        self.asleep[instance.id] = Asleep(slot, now, level)

    def wake(self, name: str, now: float) -> None:
        """Wake it: from now on it starts."""
        sleeper = self.asleep.pop(name)
        self._gone.append(self._unused(name, sleeper.since, now))
        self.starting[name] = (sleeper.slot, now)

    def role_of(self, name: str) -> Role:
        """The role of an instance that starts, sleeps or is up, or of one that was removed."""
        return Role((self._kinds.get(name) or self._removed[name]).role)

    def model_of(self, name: str) -> str:
        """The model that it serves, or will."""
        return self._kinds[name].model

    def bring_up(self, name: str) -> SimulatedInstance | None:
        """The instance, now up; None if it is no longer wanted."""
        wanted = self.starting.pop(name, None)
        if wanted is None:
            return None
        slot, since = wanted
        wanted_kind = self._kinds[name]
        kind = PreemptiveInstance if wanted_kind.part.engine_kind == "preemptive_prefill" else SimulatedInstance
        instance = kind(name, wanted_kind, since, self._settings.leaps and not self._settings.beside_s)
        if self._settings.machine_speed is not None:
            instance.speed = self._settings.machine_speed.of(slot)
        if self._settings.beside_s:
            instance.slowed_s = lambda: (
                self._settings.beside_s * any(each.stepping for each in self._live.values() if each is not instance)
            )
        instance.watch = self.watch
        self._live[name] = instance
        self._slots[slot] = name
        return instance

    def give_up(self, name: str, now: float) -> None:
        """Cancel an instance that still starts or is warm; its cost so far remains."""
        since = self.warm.pop(name).since if name in self.warm else self.starting.pop(name)[1]
        self._gone.append(self._unused(name, since, now))
        del self._kinds[name]

    def _unused(self, name: str, since: float, until: float) -> InstanceUse:
        """The use of an instance that was provisioned and never served."""
        kind = self._kinds[name]
        cost = kind.unit_cost * kind.tensor_parallel
        return InstanceUse(name, until - since, 0.0, 0, 0, 0, 0, 0, cost, kind.role)

    def remove(self, instance: SimulatedInstance, now: float) -> None:
        del self._live[instance.id]
        kind = self._kinds.pop(instance.id, None)
        if kind is not None:
            self._removed[instance.id] = kind
        self.draining.discard(instance.id)
        instance.up, instance.due = False, None
        self._gone.append(_use(instance, now))

    def uses(self, now: float) -> list[InstanceUse]:
        """The use of all instances ever ordered, including those that still start, sleep or are warm.

        One entry per instance, even if it slept in between.
        """
        waiting = {name: since for name, (_, since) in self.starting.items()}
        waiting |= {name: warm.since for name, warm in self.warm.items()}
        waiting |= {name: sleeper.since for name, sleeper in self.asleep.items()}
        unused = [self._unused(name, since, now) for name, since in waiting.items()]
        return _by_instance(self._gone + [_use(instance, now) for instance in self] + unused)


def _use(instance: SimulatedInstance, until: float) -> InstanceUse:
    totals = instance.engine.totals
    return InstanceUse(
        instance.id,
        until - instance.up_at,
        instance.busy_s,
        totals.steps,
        totals.generated,
        totals.prompt,
        totals.prompt_cached,
        totals.preemptions,
        instance.spec.unit_cost,
        instance.spec.role.value,
    )


def _by_instance(uses: Iterable[InstanceUse]) -> list[InstanceUse]:
    """Adds up what each id did before, during and after its sleep."""
    found: dict[str, InstanceUse] = {}
    for use in uses:
        before = found.get(use.id)
        found[use.id] = use if before is None else _sum(before, use)
    return list(found.values())


def _sum(one: InstanceUse, other: InstanceUse) -> InstanceUse:
    return one._replace(
        provisioned_s=one.provisioned_s + other.provisioned_s,
        busy_s=one.busy_s + other.busy_s,
        steps=one.steps + other.steps,
        generated_tokens=one.generated_tokens + other.generated_tokens,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        preemptions=one.preemptions + other.preemptions,
    )
