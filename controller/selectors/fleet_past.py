"""The fleet as it was in a window, as the simulator takes it: as many instances as the scaler counted, when it did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import Q

from controller.models import ScalingSample
from controller.selectors.fleet_model import MOST_INSTANCES, check_change, fleet_today, size_of

COLLOCATED = "collocated"
NOT_ON_RECORD = "Today's fleet: how many instances there were then is not on record."


class FleetThen(NamedTuple):
    """`groups`: the simulator's JSON, `from_s` and `until_s` after the window's start. `note`: what it is, in words."""

    groups: list[dict[str, Any]]
    note: str


class Span(NamedTuple):
    """One instance: seconds after the start, `until_s` None for one that stayed."""

    from_s: float
    until_s: float | None


def fleet_then(
    model: str, since: datetime, until: datetime, change: int = 0, field: str = "instances", role: str | None = None
) -> FleetThen:
    """Each role whose instances a scaling policy counted in the window has as many as it counted, alike the first of
    today; others are as today.

    `change`: so many more of `role` at every moment, or fewer, but one at least; without it the role that most
    instances have. Raises ConfigError as `fleet_today`.
    """
    check_change(change, field)
    today = _by_role(fleet_today(model))
    counts = {name: known for name, known in _counts(model, since, until).items() if name in today}
    changed = role or max(today, key=lambda name: size_of(today[name]))
    if changed not in counts:
        return FleetThen(fleet_today(model, change, field, role), NOT_ON_RECORD)
    note = f"As many instances as the scaler counted then: {_range(counts.values())}."
    counts[changed] = [(at, max(1, count + change) if count else 0) for at, count in counts[changed]]
    found: list[dict[str, Any]] = []
    for name, alike in today.items():
        found += _during(alike[0], spans_of(counts[name])) if name in counts else alike
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
