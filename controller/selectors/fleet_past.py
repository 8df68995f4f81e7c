"""The fleet as it was in a window, as the simulator takes it: as many instances as the scaler counted, when it did, and
today's instances in the roles that they had then where it did not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from django.db.models import Q

from controller.models import Instance, InstanceInterval, ScalingSample
from controller.selectors.fleet_model import MOST_INSTANCES, check_change, fleet_today, in_role, size_of

COLLOCATED = "collocated"
NOT_ON_RECORD = "Today's fleet: how many instances there were then is not on record."
TURNED = "Today's instances, in the roles that they had then; how many there were is not on record."
TURNED_TOO = "The others are today's, in the roles that they had then."


class FleetThen(NamedTuple):
    """`groups`: the simulator's JSON, `from_s` and `until_s` after the window's start. `note`: what it is, in words."""

    groups: list[dict[str, Any]]
    note: str


class Turn(NamedTuple):
    """An instance changed its role, `at` seconds after the start."""

    at: float
    instance: str
    old: str
    new: str


class Span(NamedTuple):
    """One instance: seconds after the start, `until_s` None for one that stayed."""

    from_s: float
    until_s: float | None


def fleet_then(
    model: str, since: datetime, until: datetime, change: int = 0, field: str = "instances", role: str | None = None
) -> FleetThen:
    """Each role whose instances a scaling policy counted in the window has as many as it counted, alike the first of
    today; others have those of today that had the role then.

    `change`: so many more of `role` at every moment, or fewer, but one at least; without it the role that most
    instances have. Raises ConfigError as `fleet_today`.
    """
    check_change(change, field)
    today, turns = _by_role(fleet_today(model)), _turns(model, since)
    changed = role or max(today, key=lambda name: size_of(today[name]))
    alike = {**_former(today, turns, field), **today}
    counted = {name: known for name, known in _counts(model, since, until).items() if name in alike}
    turned = _by_turns(today, turns, (until - since).total_seconds())
    counts = {**turned, **counted}
    if changed not in counts and (change or not turns):
        return FleetThen(fleet_today(model, change, field, role), NOT_ON_RECORD)
    note = _note(counted, turned)
    if change:
        counts[changed] = [(at, max(1, count + change) if count else 0) for at, count in counts[changed]]
    found: list[dict[str, Any]] = []
    for name, groups in alike.items():
        found += _during(groups[0], spans_of(counts[name])) if name in counts else groups
    if not 1 <= size_of(found) <= MOST_INSTANCES:
        return FleetThen(fleet_today(model, change, field, role), NOT_ON_RECORD)
    return FleetThen(found, note)


def spans_of(counts: Sequence[tuple[float, int]]) -> Iterator[Span]:
    """From (seconds, instances) in order of time; before the first there were as many as at it. The newest goes
    first."""
    here: list[float] = []
    for number, (at, count) in enumerate(counts):
        while len(here) < count:
            here.append(at if number else 0.0)
        while len(here) > count:
            began = here.pop()
            if at > began:
                yield Span(began, at)
    yield from (Span(began, None) for began in here)


def _counts(model: str, since: datetime, until: datetime) -> dict[str, list[tuple[float, int]]]:
    """By role, only the samples at which the number changed. Of a look without telemetry the number is not known."""
    rows = ScalingSample.objects.filter(policy__model__name=model, at__gte=since, at__lt=until)
    rows = rows.exclude(Q(load__isnull=True) & Q(ready=0)).order_by("at")
    found: dict[str, list[tuple[float, int]]] = {}
    for role, at, ready in rows.values_list("policy__role", "at", "ready"):
        known = found.setdefault(role, [])
        if not known or known[-1][1] != ready:
            known.append((round((at - since).total_seconds(), 3), ready))
    return found


def _turns(model: str, since: datetime) -> list[Turn]:
    """Since then, of the instances that serve today: also those after a window, whose roles in it are not today's."""
    mine = InstanceInterval.objects.filter(instance__in=Instance.objects.serving().filter(model__name=model))
    rows = mine.filter(Q(ended_at__isnull=True) | Q(ended_at__gte=since)).order_by("instance_id", "started_at")
    found = []
    for (name, _, old), (other, at, new) in pairwise(rows.values_list("instance_id", "started_at", "role")):
        if name == other and old != new:
            found.append(Turn(round((at - since).total_seconds(), 3), name, old, new))
    return sorted(found)


def _by_turns(
    today: Mapping[str, list[dict[str, Any]]], turns: Sequence[Turn], window_s: float
) -> dict[str, list[tuple[float, int]]]:
    """How many of today's instances had each role that one of them took or gave up, as `_counts`."""
    found = {}
    for role in sorted({name for turn in turns for name in (turn.old, turn.new)}):
        steps = [(turn.at, (turn.new == role) - (turn.old == role)) for turn in turns]
        here = size_of(today.get(role, [])) - sum(more for _, more in steps)
        known = found.setdefault(role, [(0.0, max(0, here))])
        for at, more in steps:
            here += more
            if more and at < window_s:
                known.append((at, max(0, here)))
    return found


def _former(today: Mapping[str, Any], turns: Iterable[Turn], field: str) -> dict[str, list[dict[str, Any]]]:
    """The roles that nobody has any more: alike the instance that was the last to give it up."""
    return {turn.old: [in_role(turn.instance, turn.old, field)] for turn in turns if turn.old not in today}


def _note(counted: Mapping[str, Sequence[tuple[float, int]]], turned: Iterable[str]) -> str:
    if not counted:
        return TURNED
    note = f"As many instances as the scaler counted then: {_range(counted.values())}."
    return note if set(turned) <= set(counted) else f"{note} {TURNED_TOO}"


def _by_role(groups: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        found.setdefault(group.get("role", COLLOCATED), []).append(group)
    return found


def _during(group: dict[str, Any], spans: Iterable[Span]) -> list[dict[str, Any]]:
    there = []
    for span in spans:
        until = {} if span.until_s is None else {"until_s": span.until_s}
        there.append({**group, "count": 1, "from_s": span.from_s, **until})
    return there


def _range(by_role: Iterable[Sequence[tuple[float, int]]]) -> str:
    """At least and at most, the roles' added up."""
    numbers = [[count for _, count in counts] for counts in by_role]
    low, high = sum(map(min, numbers)), sum(map(max, numbers))
    return str(high) if low == high else f"{low} to {high}"
