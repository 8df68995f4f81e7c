"""The fleet of a past window as input of the simulator: as many instances as the scaler counted at each time, and, of
roles that it did not count, the current instances that had the role then."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from django.db.models import Q

from controller.core.errors import ConfigError
from controller.core.types import Role
from controller.models import Instance, InstanceInterval, ScalingSample
from controller.selectors.experiments.fleet_model import MOST_INSTANCES, check_change, fleet_today, in_role, size_of

COLLOCATED = "collocated"
NOT_ON_RECORD = "Uses the current fleet: the number of instances at that time is not recorded."
TURNED = "Uses the current instances in the roles they had at that time; their number then is not recorded."
TURNED_TOO = "Other roles use the current instances in the roles they had at that time."
COUNTED_ELSE_TURNED = (
    "Uses the number of instances that the scaler recorded, else the current instances in the roles they had then."
)
DATED_S = 1.0  # a sample has the time at which its tick began, and may include a role change this much later


class FleetThen(NamedTuple):
    """`groups`: the simulator's JSON, with `from_s` and `until_s` in seconds after the start of the window. `note`: a
    description of the fleet."""

    groups: list[dict[str, Any]]
    note: str


class RoleTurn(NamedTuple):
    """An instance changed its role, `at` seconds after the start."""

    at: float
    instance: str
    old: str
    new: str


class Span(NamedTuple):
    """The presence of one instance, in seconds after the start; `until_s` None: it stayed."""

    from_s: float
    until_s: float | None


def fleet_then(
    model: str, since: datetime, until: datetime, change: int = 0, field: str = "instances", role: str | None = None
) -> FleetThen:
    """Roles that a scaling policy counted in the window have as many instances as it counted, like the first current
    one. Other roles have the current instances that had the role then. If that is unknown, it is the current fleet.

    `change`: add so many of `role` at every moment, or remove so many, but at least one stays. Without `role`, the role
    that most instances have. Raises ConfigError as `fleet_today`.
    """
    check_change(change, field)
    found = _on_record(model, since, until, change, field, role)
    return FleetThen(fleet_today(model, change, field, role), NOT_ON_RECORD) if found is None else found


def _on_record(
    model: str, since: datetime, until: datetime, change: int, field: str, role: str | None
) -> FleetThen | None:
    """None if too little is known, or if what is known is no fleet that could have served."""
    today, turns = _by_role(fleet_today(model)), _turns(model, since)
    changed = role or max(today, key=lambda name: size_of(today[name]))
    former = {turn.old: turn.instance for turn in turns if turn.old not in today}  # the last one that gave the role up
    counted = {name: known for name, known in _counts(model, since, until).items() if name in {*today, *former}}
    turned = _by_turns(today, turns, (until - since).total_seconds())
    counts = {**counted, **{name: _merged(counted.get(name, []), steps) for name, steps in turned.items()}}
    if changed not in counts and (change or not turns):
        return None
    if change:
        counts[changed] = [(at, max(1, count + change) if count else 0) for at, count in counts[changed]]
    spans = {name: list(spans_of(known)) for name, known in counts.items()}
    try:  # only instances that are needed, since others may have had a role that cannot be simulated
        gone = {name: [in_role(instance, name, field)] for name, instance in former.items() if spans[name]}
    except ConfigError:
        return None
    found: list[dict[str, Any]] = []
    for name, groups in {**gone, **today}.items():
        found += _during(groups[0], spans[name]) if name in spans else groups
    if not 1 <= size_of(found) <= MOST_INSTANCES:
        return None
    roles = _by_role(found)
    if (Role.PREFILL in roles) != (Role.DECODE in roles):  # the instances of the other stage no longer exist
        return None
    return FleetThen(found, _note(counted, turned))


def _merged(looks: Sequence[tuple[float, int]], steps: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """The last count of a role or role change, whichever is later. A count holds only until a role change, since the
    policy may have been created or switched off at one. `steps`: as in `_by_turns`."""
    first, *turns = steps
    moments = [at for at, _ in turns]
    sure = [each for each in looks if not _just_before(each[0], moments)]
    known = sorted([*sure, *turns], key=lambda each: each[0])
    return known if sure and known[0] == sure[0] else [first, *known]


def _just_before(at: float, moments: Sequence[float]) -> bool:
    after = bisect_left(moments, at)
    return after < len(moments) and moments[after] - at <= DATED_S


def spans_of(counts: Sequence[tuple[float, int]]) -> Iterator[Span]:
    """Spans from (seconds, instances) in order of time. Before the first entry there were as many as at it. The newest
    instance leaves first."""
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
    """Counts by role, in order of time. The number is unknown for samples without telemetry."""
    rows = ScalingSample.objects.filter(policy__model__name=model, at__gte=since, at__lt=until)
    rows = rows.exclude(Q(load__isnull=True) & Q(ready=0)).order_by("at")
    found: dict[str, list[tuple[float, int]]] = {}
    for role, at, ready in rows.values_list("policy__role", "at", "ready"):
        found.setdefault(role, []).append((round((at - since).total_seconds(), 3), ready))
    return found


def _turns(model: str, since: datetime) -> list[RoleTurn]:
    """Role changes since then of the instances that serve now. Changes after the window count too, since the roles in
    it differ from the current ones."""
    mine = InstanceInterval.objects.filter(instance__in=Instance.objects.serving().filter(model__name=model))
    rows = mine.filter(Q(ended_at__isnull=True) | Q(ended_at__gte=since)).order_by("instance_id", "started_at")
    found = []
    for (name, _, old), (other, at, new) in pairwise(rows.values_list("instance_id", "started_at", "role")):
        if name == other and old != new:
            found.append(RoleTurn(round((at - since).total_seconds(), 3), name, old, new))
    return sorted(found)


def _by_turns(
    today: Mapping[str, list[dict[str, Any]]], turns: Sequence[RoleTurn], window_s: float
) -> dict[str, list[tuple[float, int]]]:
    """How many of the current instances had each role that one of them took or gave up, in the form of `_counts`."""
    found: dict[str, list[tuple[float, int]]] = {}
    for role in sorted({name for turn in turns for name in (turn.old, turn.new)}):
        steps = [(turn.at, (turn.new == role) - (turn.old == role)) for turn in turns]
        here = size_of(today.get(role, [])) - sum(more for _, more in steps)
        known = found.setdefault(role, [(0.0, max(0, here))])
        for at, more in steps:
            here += more
            if more and at < window_s:
                known.append((at, max(0, here)))
    return found


def _note(counted: Mapping[str, Sequence[tuple[float, int]]], turned: Mapping[str, Sequence[object]]) -> str:
    if not counted:
        return TURNED
    if any(len(turned.get(name, ())) > 1 for name in counted):  # then their sum is not a number of instances
        return COUNTED_ELSE_TURNED
    note = f"Uses the number of instances that the scaler recorded: {_range(counted.values())}."
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
    """The least and the most instances at once, summed over roles."""
    numbers = [[count for _, count in counts] for counts in by_role]
    low, high = sum(map(min, numbers)), sum(map(max, numbers))
    return str(high) if low == high else f"{low} to {high}"
