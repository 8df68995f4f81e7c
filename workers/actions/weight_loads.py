"""Advances a weight load of an instance, and the watch for the first request that a new instance serves.

The engine is asked for the state of its weights. Present: the load is done. Loading: the next run looks again. Absent:
it is told to load, under a name that is stored before. Absent although the newest load has that name: no source had the
weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.models.fleet import Weights
from controller.selectors.fleet.weights import first_token_at, weight_plan
from controller.services.fleet.actions import action_end, action_keep
from controller.wording.vocabulary import reason_in_words
from workers.actions.weights_client import EngineAway, EngineRefuses, EngineWeights, WeightsClient

LOAD_TIMEOUT = timedelta(minutes=10)  # from the order until the weights are present, without the time that it was held
MOST_HELD = timedelta(hours=2)  # which does not count: at a floor of 5 %, what 6 minutes take on an idle link
MOST_TRIES = 3  # more than one, since an engine that was restarted in between has forgotten its load
WATCH = timedelta(hours=1)  # for a first request
MOST = 2.0**62  # of a figure
MOST_LEVEL = 1000
RECORDS_COME = timedelta(seconds=10)  # requests are recorded when they end, so an earlier token may be recorded later


def advance(action: Action, engine: WeightsClient, utilisation: Mapping[str, float]) -> Decision | None:
    """Advance the action once; returns its Decision if it ended."""
    try:
        return _weights(action, engine, utilisation)
    except EngineAway as error:
        return _later(action, str(error))
    except EngineRefuses as error:
        # It is busy with another load, whose result the next run sees.
        return _later(action, str(error)) if error.busy else give_up(action, "engine_refused", str(error))


def load_timeout(action: Action) -> timedelta:
    """How long this load may take: more urgent transfers may hold it, and a floor lets it end nevertheless."""
    held = timedelta(seconds=min(_figure(action.params.get("held_s")), MOST_HELD.total_seconds()))
    return LOAD_TIMEOUT + held


def tried(action: Action, engine: WeightsClient) -> Sequence[Mapping[str, Any]]:
    """The sources that the engine reports as tried for this action; empty if it does not respond."""
    try:
        said = engine.look()
    except EngineAway:
        return []
    return list(said.attempts) if said.order == _name(action) else []


def give_up(
    action: Action, reason: str, error: str, said: Sequence[Mapping[str, Any]] | None = None
) -> Decision | None:
    """End an action that failed or is no longer needed. `said`: the attempts that the engine reported."""
    attempts = _named(action, said or [])
    return _end(action, Action.State.FAILED, reason, {"error": error, "attempts": attempts}, error, attempts)


def _later(action: Action, error: str = "", **fields: Any) -> Decision | None:
    """Store the progress; the next run continues. There is no Decision yet."""
    action_keep(action=action, error=error, **fields)
    return None


def _weights(action: Action, engine: WeightsClient, utilisation: Mapping[str, float]) -> Decision | None:
    said = engine.look()
    if said.state == "absent":
        said = engine.look()  # asked again, since another worker may have ordered a load before our lease
    mine = action.tries > 0 and said.order == _name(action)
    if said.state == "present":
        return _present(action, said, mine)
    if said.state == "loading":
        # The source that sends now, for plans of other loads, and how long it was held, for the time-out.
        trying = {"trying": len(said.attempts), "held_s": _figure(said.held_s)} if mine else {}
        return _later(action, state=Action.State.RUNNING, params={**action.params, **trying})
    if mine:
        return give_up(action, "no_source", _last_error(said.attempts), said.attempts)
    if action.tries >= MOST_TRIES:
        return give_up(action, "engine_forgot", f"ordered {action.tries} times, and the engine knows of no load")
    if not _plan(action, utilisation, said.host_copy):
        return None
    engine.order_load(_name(action), action.params["told"])
    return _later(action)


def _plan(action: Action, utilisation: Mapping[str, float], host_copy: bool) -> bool:
    """Choose the sources and store them before the engine gets them. False: another worker holds the action now."""
    params: dict[str, Any] = {**action.params, "trying": 0}
    if "sources" in params:
        params["told"] = params["sources"]
    else:
        plan = weight_plan(action.instance, utilisation, host_copy=host_copy)
        params["told"] = [
            {"kind": each.kind, **({"url": each.url, "id": each.id} if each.url else {})} for each in plan.choices
        ]
        params["plan"] = {"reason": plan.reason, **plan.figures}
        params["rejected"] = dict(plan.rejected)
    told = {"params": params, "tries": action.tries + 1, "state": Action.State.RUNNING, "error": ""}
    return action_keep(action=action, release=False, **told)


def _name(action: Action) -> str:
    return f"action-{action.pk}-{action.tries}"


# ---- ends -----------------------------------------------------------------------------------------------------------


def _present(action: Action, said: EngineWeights, mine: bool) -> Decision | None:
    attempts = _named(action, said.attempts) if mine else []
    good = next((each for each in attempts if not each["error"]), None)
    outcome: dict[str, Any] = {"state": "present", "bytes": said.bytes, "attempts": attempts}
    if good is not None:
        outcome |= {"source": good["kind"], "from": good["source"], "load_s": round(good["seconds"], 3)}
        if good["flow"]:
            outcome |= {"flow": good["flow"], "held_s": good["held_s"], "flow_level": good["level"]}
        outcome["tried_s"] = round(sum(each["seconds"] for each in attempts), 3)
        if said.present_s is not None:  # measured by the engine, since this run comes later
            ordered_s = (timezone.now() - action.created_at).total_seconds()
            outcome["ready_s"] = round(min(max(ordered_s - _figure(said.present_s), 0.0), ordered_s), 3)
    reason = f"from_{good['kind']}" if good else "present_already"
    return _end(action, Action.State.DONE, reason, outcome, "", attempts)


def _end(
    action: Action, state: str, reason: str, outcome: Mapping[str, Any], error: str, attempts: list[dict[str, Any]]
) -> Decision | None:
    waited = (timezone.now() - action.created_at).total_seconds()
    params = action.params
    inputs = {**params.get("plan", {}), "tries": action.tries, "ordered_s": round(waited, 3), "action": action.pk}
    if "sources" in params:
        inputs["sources"] = params["sources"]
    if "scale_out" in params:
        inputs["scale_out"] = params["scale_out"].get("decision")
    return action_end(
        action=action,
        state=state,
        kind="weights_load" if state == Action.State.DONE else "weights_load_failed",
        subject=("instance", action.instance_id),
        reason=reason,
        inputs=inputs,
        outcome=outcome,
        error=error,
        attempts=attempts,
    )


class StartOrder(NamedTuple):
    """Why the instance was started whose first token is awaited. `kind`: of the decision at the end, without its
    suffix; `since`: time of the order; `how`: the reason of that decision; `began`: its process was started for it
    too."""

    kind: str
    subject: tuple[str, str]
    since: datetime
    inputs: Mapping[str, Any]
    how: str
    began: bool


def _start_order(action: Action) -> StartOrder:
    launch = action.params.get("launch")
    if launch is not None:
        since, known = datetime.fromisoformat(launch["at"]), {"launch": launch["decision"], "seed": launch["seed"]}
        return StartOrder("launch", ("instance", action.instance_id), since, known, "launched", True)
    asked = action.params["scale_out"]
    how = "woken" if asked.get("woken") else "warm" if asked.get("warm") else "started"
    known = {"instance": action.instance_id, "scale_out": asked.get("decision")}
    subject = ("scaling_policy", asked["policy"])
    return StartOrder("scale_out", subject, action.created_at, known, how, not asked.get("warm"))


def first_served(action: Action) -> Decision | None:
    """Advance the watch for the first token of a new instance. Its Decision has the time from the order to that token
    and the source of the weights."""
    row, order = action.instance, _start_order(action)
    at = first_token_at(row, order.since)
    now = timezone.now()
    if at is not None and now - at < RECORDS_COME:
        at = None
    elif at is None and (failed := _failed_since(row, order.since)) is not None:
        return _unserved(action, order, "never_woke", failed.error)
    elif at is None and row.weights == Weights.ASLEEP:
        return _unserved(action, order, "slept_before")
    elif at is None and row.desired_state == Instance.Desired.STOPPED:
        return _unserved(action, order, "stopped_before")
    elif at is None and now - action.created_at > WATCH:
        return _unserved(action, order, "never_served")
    if at is None:
        return _later(action, state=Action.State.RUNNING)
    served = {"first_served_s": round((at - order.since).total_seconds(), 3)}
    if row.ready_at is not None and order.began:
        served["ready_s"] = round((row.ready_at - order.since).total_seconds(), 3)
    return _served(action, order, Action.State.DONE, order.how, served, "")


def _failed_since(row: Instance, since: datetime) -> Action | None:
    """The last weight load or wake-up since then, if it failed."""
    kinds = (Action.Kind.WEIGHTS_LOAD, Action.Kind.WAKE)
    last = Action.objects.filter(instance=row, kind__in=kinds, created_at__gte=since).order_by("-created_at").first()
    return last if last is not None and last.state == Action.State.FAILED else None


def _unserved(action: Action, order: StartOrder, reason: str, error: str = "") -> Decision | None:
    """End the watch without a first token. `error`: more than the words of the reason, if known."""
    return _served(action, order, Action.State.FAILED, reason, {}, error or reason_in_words(reason))


def _served(
    action: Action, order: StartOrder, state: str, reason: str, outcome: dict[str, Any], error: str
) -> Decision | None:
    kinds = ("weights_load", "instance_awake")
    loads = Decision.objects.filter(
        kind__in=kinds, subject_type="instance", subject=action.instance_id, at__gte=action.created_at
    )
    load = loads.order_by("at").first()
    if load is not None:
        names = ("source", "from", "load_s", "bytes")
        outcome |= {name: load.outcome[name] for name in names if name in load.outcome}
    return action_end(
        action=action,
        state=state,
        kind=f"{order.kind}_served" if state == Action.State.DONE else f"{order.kind}_unserved",
        subject=order.subject,
        reason=reason,
        inputs=order.inputs,
        outcome=outcome,
        error=error,
    )


def _named(action: Action, attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The attempts as the engine reports them, with the instance behind each URL."""
    ids = {each.get("url", ""): each.get("id", "") for each in action.params.get("told", [])}
    return [
        {
            "kind": str(each.get("kind", "")),
            "url": str(each.get("url", "")),
            "source": ids.get(each.get("url", ""), "") if each.get("url") else "",
            "seconds": round(_figure(each.get("seconds")), 4),
            "bytes": int(_figure(each.get("bytes"))),
            "flow": str(each.get("flow", ""))[:40],
            "held_s": round(_figure(each.get("held_s")), 4),
            "level": min(int(_figure(each.get("level"))), MOST_LEVEL),
            "error": str(each.get("error", "")),
        }
        for each in attempts
    ]


def _last_error(attempts: Sequence[Mapping[str, Any]]) -> str:
    said = [f"{each.get('kind')}: {each.get('error')}" for each in attempts if each.get("error")]
    return "; ".join(said) or "the load ended without weights and without a reason"


def _figure(said: Any) -> float:
    """A figure of an engine as a number that a column can hold; 0 if it is not a finite number."""
    good = isinstance(said, int | float) and math.isfinite(said)
    return min(max(float(said), 0.0), MOST) if good else 0.0
