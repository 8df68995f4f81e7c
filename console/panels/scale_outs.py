"""Progress of a scale-out by instance: decided, requested, weights loaded, ready, first token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.urls import reverse

from controller.models import Action, Decision, Instance
from controller.wording.scaling import STEPS_TO_SERVICE, WAITED_FOR
from controller.wording.sentences import sentence

LOADS = (Action.Kind.WEIGHTS_LOAD, Action.Kind.WAKE)
MOST = 20  # instances shown of one scale-out
Kind, State = Action.Kind, Action.State


@dataclass(frozen=True, slots=True)
class ScaleOutStep:
    """`at`: None if it has not happened, and may never; `after_s`: seconds since the decision."""

    what: str
    text: str
    at: datetime | None = None
    after_s: float | None = None
    url: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """One instance from the decision to its first token. `number`: id of the scale-out decision."""

    instance: str
    number: int
    steps: list[ScaleOutStep]


def ways_of(decision: Decision) -> list[Way]:
    """Of a scale-out: each instance it started. Of a decision that belongs to one: its instance. Four queries."""
    number = decision.pk if decision.kind == "scale_out" else decision.inputs.get("scale_out")
    if not isinstance(number, int):
        return []
    if decision.kind == "scale_out":
        return _ways(number, decision, (decision.outcome.get("started") or [])[:MOST])
    own = decision.subject if decision.subject_type == "instance" else decision.inputs.get("instance")
    return _ways(number, Decision.objects.filter(pk=number).first(), [own] if own else [])


def way_of(row: Instance, orders: Iterable[Action]) -> Way | None:
    """The newest scale-out that started this instance or took it from the pool; None if there was none.

    `orders`: its actions, newest first. At most four queries, none without a scale-out.
    """
    asked = (order.params["scale_out"] for order in orders if order.params.get("scale_out"))
    number = next((each["decision"] for each in asked if each.get("decision") is not None), None)
    if number is None:
        return None
    found = _ways(number, Decision.objects.filter(pk=number).first(), [row.pk])
    return found[0] if found else None


def _ways(number: int, scale_out: Decision | None, names: Sequence[str]) -> list[Way]:
    rows = Instance.objects.in_bulk(names)
    orders = Action.objects.filter(instance__in=list(rows), params__scale_out__decision=number)
    by_name: dict[str, dict[str, Action]] = {name: {} for name in rows}
    for order in orders.select_related("decision").order_by("id"):
        by_name[order.instance_id]["load" if order.kind in LOADS else order.kind] = order
    known = {name: mine for name, mine in by_name.items() if mine}
    came_up = _came_up(name for name, mine in known.items() if not _taken(mine))
    return [
        Way(name, number, _steps(rows[name], number, scale_out, known[name], came_up.get(name)))
        for name in names
        if name in known
    ]


def _taken(orders: Mapping[str, Action]) -> bool:
    """It was warm or asleep, so no process was started."""
    asked = next(iter(orders.values())).params["scale_out"]
    return bool(asked.get("warm") or asked.get("woken"))


def _what_was_ordered(orders: Mapping[str, Action]) -> str:
    asked = next(iter(orders.values())).params["scale_out"]
    return WAITED_FOR["wake_ordered" if asked.get("woken") else "weights_ordered" if asked.get("warm") else "started"]


def _came_up(names: Iterable[str]) -> dict[str, Decision]:
    """By instance: the decision that first found it ready."""
    found: dict[str, Decision] = {}
    asked = list(names)
    seen = Decision.objects.filter(kind="instance_ready", subject_type="instance", subject__in=asked)
    for decision in seen.order_by("-at") if asked else ():
        found[decision.subject] = decision
    return found


def _steps(
    row: Instance, number: int, scale_out: Decision | None, orders: Mapping[str, Action], up: Decision | None
) -> list[ScaleOutStep]:
    """Completed steps in order of time, then pending ones."""
    load, watch = orders.get("load"), orders.get(Kind.FIRST_SERVED)
    since = scale_out.at if scale_out else min(order.created_at for order in orders.values())

    def step(
        name: str, text: str, at: datetime | None, decision: Decision | None = None, failed: bool = False
    ) -> ScaleOutStep:
        after_s = max(0.0, (at - since).total_seconds()) if at else None
        url = reverse("decision", args=[decision.pk]) if decision else ""
        return ScaleOutStep(STEPS_TO_SERVICE[name], text, at, after_s, url, failed)

    decided = sentence(scale_out) if scale_out else f"Decision {number} is no longer stored"
    found = [step("decision", decided, since if scale_out else None, scale_out)]
    ordered = load or watch
    if ordered is not None:
        found.append(step("order", _what_was_ordered(orders), ordered.created_at))
    if load is not None:
        text = sentence(load.decision) if load.decision else load.error or WAITED_FOR["weights"]
        found.append(step("weights", text, _with_weights(load), load.decision, load.state == State.FAILED))
    if up is not None:
        found.append(step("process" if load else "ready", sentence(up), up.at, up))
    if load is not None and load.state == State.DONE:
        found.append(step("ready", WAITED_FOR["takes_requests"], _with_weights(load)))
    elif up is None and not _taken(orders):
        lost = row.observed_state in Instance.GONE
        found.append(step("ready", row.error or row.observed_state if lost else WAITED_FOR["ready"], None, failed=lost))
    if watch is not None:
        served = (watch.decision.outcome if watch.decision else {}).get("first_served_s")
        at = watch.created_at + timedelta(seconds=served) if served is not None else watch.ended_at
        text = sentence(watch.decision) if watch.decision else WAITED_FOR["first_token"]
        found.append(step("first_token", text, at, watch.decision, watch.state == State.FAILED))
    come = [each for each in found[1:] if each.at is not None]
    waited = [each for each in found[1:] if each.at is None]
    return [found[0], *sorted(come, key=lambda each: each.at or since), *waited]


def _with_weights(load: Action) -> datetime | None:
    """When the engine says it was ready, if it does: the poll that noticed it came later."""
    said: Any = (load.decision.outcome if load.decision else {}).get("ready_s")
    return load.created_at + timedelta(seconds=said) if isinstance(said, int | float) else load.ended_at
