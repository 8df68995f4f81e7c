"""One look at an instance that shall load its weights, and at one whose first served request is waited for.

The engine is asked first. Present: done. Loading: another look later. Absent: told to load, under a name that is stored
before it is told; absent although it was told under that name: no source gave them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.models.fleet import Weights
from controller.selectors.weights import first_token_at, weight_plan
from controller.services.actions import action_end, action_keep
from controller.wording.vocabulary import reason_in_words
from workers.actions.weights_client import EngineAway, EngineRefuses, EngineWeights, WeightsClient

LOAD_TIMEOUT = timedelta(minutes=10)  # from the order to weights that are there
MOST_TRIES = 3  # an engine that was started again in between forgot what it was told
WATCH = timedelta(hours=1)  # for a first request
MOST = 2.0**62  # of a figure
RECORDS_COME = timedelta(seconds=10)  # a request is recorded when it ends: an earlier token may be recorded later


def look_at(action: Action, engine: WeightsClient, utilisation: Mapping[str, float]) -> Decision | None:
    """The Decision if this look ended it."""
    try:
        return _weights(action, engine, utilisation)
    except EngineAway as error:
        return _later(action, str(error))
    except EngineRefuses as error:
        # Busy with somebody else's load: what comes of it shows at the next look.
        return _later(action, str(error)) if error.busy else give_up(action, "engine_refused", str(error))


def tried(action: Action, engine: WeightsClient) -> Sequence[Mapping[str, Any]]:
    """The sources of which its engine says that they were tried for this order; none if it says nothing now."""
    try:
        said = engine.look()
    except EngineAway:
        return []
    return list(said.attempts) if said.order == _name(action) else []


def give_up(
    action: Action, reason: str, error: str, said: Sequence[Mapping[str, Any]] | None = None
) -> Decision | None:
    """It cannot be brought about, or has become pointless. `said`: what the engine tried."""
    attempts = _named(action, said or [])
    return _end(action, Action.State.FAILED, reason, {"error": error, "attempts": attempts}, error, attempts)


def _later(action: Action, error: str = "", **fields: Any) -> Decision | None:
    """It is looked at again: no decision yet."""
    action_keep(action=action, error=error, **fields)
    return None


def _weights(action: Action, engine: WeightsClient, utilisation: Mapping[str, float]) -> Decision | None:
    said = engine.look()
    if said.state == "absent":
        said = engine.look()  # that was heard before the lease: another worker may have told it something since
    mine = action.tries > 0 and said.order == _name(action)
    if said.state == "present":
        return _present(action, said, mine)
    if said.state == "loading":
        trying = {"trying": len(said.attempts)} if mine else {}  # of what it was told: who sends now, for other plans
        return _later(action, state=Action.State.RUNNING, params={**action.params, **trying})
    if mine:
        return give_up(action, "no_source", _last_error(said.attempts), said.attempts)
    if action.tries >= MOST_TRIES:
        return give_up(action, "engine_forgot", f"told {action.tries} times, and it knows of none")
    if not _plan(action, utilisation, said.host_copy):
        return None
    engine.order_load(_name(action), action.params["told"])
    return _later(action)


def _plan(action: Action, utilisation: Mapping[str, float], host_copy: bool) -> bool:
    """What it will be told, stored before it is told. False: the action is somebody else's by now."""
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
        outcome["tried_s"] = round(sum(each["seconds"] for each in attempts), 3)
        if said.present_s is not None:  # the engine's own moment: this look comes later
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


class Wish(NamedTuple):
    """What brought the instance whose first token is waited for. `kind`: of the decision at the end, without its
    ending; `since`: when it was asked for; `how`: in a word; `began`: its process too was started for this."""

    kind: str
    subject: tuple[str, str]
    since: datetime
    inputs: Mapping[str, Any]
    how: str
    began: bool


def _wish(action: Action) -> Wish:
    launch = action.params.get("launch")
    if launch is not None:
        since, known = datetime.fromisoformat(launch["at"]), {"launch": launch["decision"], "seed": launch["seed"]}
        return Wish("launch", ("instance", action.instance_id), since, known, "launched", True)
    asked = action.params["scale_out"]
    how = "woken" if asked.get("woken") else "warm" if asked.get("warm") else "started"
    known = {"instance": action.instance_id, "scale_out": asked.get("decision")}
    subject = ("scaling_policy", asked["policy"])
    return Wish("scale_out", subject, action.created_at, known, how, not asked.get("warm"))


def first_served(action: Action) -> Decision | None:
    """Time from the order to the first token that the new instance gave, and where its weights came from."""
    row, wish = action.instance, _wish(action)
    at = first_token_at(row, wish.since)
    now = timezone.now()
    if at is not None and now - at < RECORDS_COME:
        at = None
    elif at is None and (failed := _failed_since(row, wish.since)) is not None:
        return _unserved(action, wish, "never_woke", failed.error)
    elif at is None and row.weights == Weights.ASLEEP:
        return _unserved(action, wish, "slept_before")
    elif at is None and row.desired_state == Instance.Desired.STOPPED:
        return _unserved(action, wish, "stopped_before")
    elif at is None and now - action.created_at > WATCH:
        return _unserved(action, wish, "never_served")
    if at is None:
        return _later(action, state=Action.State.RUNNING)
    served = {"first_served_s": round((at - wish.since).total_seconds(), 3)}
    if row.ready_at is not None and wish.began:
        served["ready_s"] = round((row.ready_at - wish.since).total_seconds(), 3)
    return _served(action, wish, Action.State.DONE, wish.how, served, "")


def _failed_since(row: Instance, since: datetime) -> Action | None:
    """The load or wake that ended without weights, and nothing of the kind is tried any more."""
    kinds = (Action.Kind.WEIGHTS_LOAD, Action.Kind.WAKE)
    last = Action.objects.filter(instance=row, kind__in=kinds, created_at__gte=since).order_by("-created_at").first()
    return last if last is not None and last.state == Action.State.FAILED else None


def _unserved(action: Action, wish: Wish, reason: str, error: str = "") -> Decision | None:
    """`error`: what is known beyond the words of the reason."""
    return _served(action, wish, Action.State.FAILED, reason, {}, error or reason_in_words(reason))


def _served(
    action: Action, wish: Wish, state: str, reason: str, outcome: dict[str, Any], error: str
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
        kind=f"{wish.kind}_served" if state == Action.State.DONE else f"{wish.kind}_unserved",
        subject=wish.subject,
        reason=reason,
        inputs=wish.inputs,
        outcome=outcome,
        error=error,
    )


def _named(action: Action, attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As the engine tells them, with the instance behind each url."""
    ids = {each.get("url", ""): each.get("id", "") for each in action.params.get("told", [])}
    return [
        {
            "kind": str(each.get("kind", "")),
            "url": str(each.get("url", "")),
            "source": ids.get(each.get("url", ""), "") if each.get("url") else "",
            "seconds": round(_figure(each.get("seconds")), 4),
            "bytes": int(_figure(each.get("bytes"))),
            "error": str(each.get("error", "")),
        }
        for each in attempts
    ]


def _last_error(attempts: Sequence[Mapping[str, Any]]) -> str:
    said = [f"{each.get('kind')}: {each.get('error')}" for each in attempts if each.get("error")]
    return "; ".join(said) or "the load ended without weights and without a reason"


def _figure(said: Any) -> float:
    """What an engine says of a transfer is kept with it: a number that a column holds, 0 for what is none."""
    good = isinstance(said, int | float) and math.isfinite(said)
    return min(max(float(said), 0.0), MOST) if good else 0.0
