"""Instances that exist for part of a run: when each joins and how it leaves.

A replay of yesterday's traffic needs yesterday's fleet. An instance that leaves is drained first, as in a scale-in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.snapshot import FleetState
from controller.core.types import Role
from controller.simulator.fleet.run import FleetRun
from controller.simulator.heap import EventKind
from controller.simulator.settings import InstanceSettings, SimulationSettings

LOOK_S = 1.0  # interval of checks whether a draining instance is empty


def fleet_of(run: FleetRun, now: float) -> dict[str, FleetState]:
    """All instances as the scheduler sees them, by id."""
    return {state.id: state for state in run.scheduler.fleet(now)}


def drain(run: FleetRun, name: str) -> None:
    run.cluster.draining.add(name)
    run.tell(ev.InstanceDraining(name))


def end_drained(
    run: FleetRun, now: float, names: Collection[str], levels: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """Remove those of these draining instances that are empty; returns their ids.

    An instance with a level in `levels` falls asleep at that level instead.
    """
    cluster, kv, gone = run.cluster, run.kv, []
    fleet = fleet_of(run, now) if names else {}
    for name in sorted(names):
        instance, state = cluster.get(name), fleet.get(name)
        busy = state is not None and state.outstanding > 0
        busy = busy or run.links.busy(name) or (kv is not None and kv.busy(name))
        if instance is None or not instance.engine.idle or busy:
            continue
        if name in levels:
            cluster.put_to_sleep(instance, now, levels[name])
        else:
            cluster.remove(instance, now)
        run.tell(ev.InstanceDown(name))
        gone.append(name)
    return gone


class Presence:
    """The settings' instances join, each in its slot, and leave."""

    def __init__(self, run: FleetRun) -> None:
        self._run = run
        self._leaving: set[str] = (
            set()
        )  # instances that a scaler drains are not among them, since they may change their role

    def start(self) -> None:
        run = self._run
        for slot, each in enumerate(run.settings.instances):
            if each.left:
                continue
            if each.sleep_level:
                run.cluster.begin_asleep(slot, each.sleep_level)
                continue
            if each.from_s > 0:
                run.heap.push(each.from_s, EventKind.FAILURE, partial(self._join, slot))
                if each.role != Role.DECODE:
                    run.joins.awaited(slot, each.model, each.from_s)
            else:
                self._join(slot)
            if each.until_s is not None:
                run.heap.push(each.until_s, EventKind.FAILURE, partial(self._leave, slot))

    def _join(self, slot: int) -> None:
        self._run.bring_up(self._run.cluster.ask(slot, self._run.heap.now))
        self._run.joins.came(slot)

    def _leave(self, slot: int) -> None:
        instance = self._run.cluster.in_slot(slot)
        if instance is None or instance.id in self._run.cluster.draining:
            return
        drain(self._run, instance.id)
        self._leaving.add(instance.id)
        self._look()

    def _look(self) -> None:
        run, now = self._run, self._run.heap.now
        self._leaving &= run.cluster.draining
        self._leaving.difference_update(end_drained(run, now, self._leaving))
        if self._leaving:
            run.heap.push(now + LOOK_S, EventKind.TICK, self._look)


def numbers(settings: SimulationSettings) -> tuple[int, int]:
    """The smallest and the largest number of the settings' instances that exist at one time."""
    there = [each for each in settings.instances if not each.left and not each.sleep_level]
    edges = {0.0, *(each.from_s for each in there), *(each.until_s for each in there if each.until_s is not None)}
    counts = [sum(each.from_s <= at and (each.until_s is None or at < each.until_s) for each in there) for at in edges]
    return min(counts), max(counts)


def from_second(settings: SimulationSettings, start: float) -> SimulationSettings:
    """The same run from `start` seconds on, without instances that had left by then.

    One stage may exist without the other, as in the whole run: collocated instances prefill for themselves and decode
    for others. Failure times count from the new begin. Raises ConfigError if no instance that serves is left.
    """
    instances = tuple(_seen_from(each, start) for each in settings.instances)
    roles = {each.role for each in instances if not each.left}
    if not roles:
        raise ConfigError("no instance was there any more when its requests came", field="instances")
    if len(roles) == 1 and Role.COLLOCATED not in roles:
        (alone,) = roles
        raise ConfigError(f"only {alone} instances were still there when its requests came", field="instances")
    return replace(settings, instances=instances)


def _seen_from(each: InstanceSettings, start: float) -> InstanceSettings:
    if each.left or (each.until_s is not None and each.until_s <= start):
        return replace(each, left=True)
    until_s = None if each.until_s is None else each.until_s - start
    return replace(each, from_s=max(0.0, each.from_s - start), until_s=until_s)
