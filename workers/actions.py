"""One look at each open action: ask the engine, act, record. Nothing waits here, so a killed worker loses nothing.

Weights: the engine is asked first. Present: done. Loading: another look later. Absent: told to load, under a name that
is stored before it is told; absent although it was told under that name: no source gave them. Sleep and wake-up are
looked at by `workers.sleeping`, changes of role by `workers.role_switches`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db import Error
from django.utils import timezone

from controller.core.messages import FleetMessage
from controller.models import Action, Decision, Instance
from controller.models.fleet import Weights
from controller.selectors.weights import first_token_at, weight_plan
from controller.services.actions import action_end, action_keep, action_lease, actions_open
from workers import role_switches, sleeping
from workers.long_calls import LongCalls
from workers.sglang_sleep import SglangSleepClient
from workers.sleep_client import SleepClient
from workers.weights import EngineAway, EngineRefuses, EngineWeights, WeightsClient

log = logging.getLogger(__name__)

LOAD_TIMEOUT = timedelta(minutes=10)  # from the order to weights that are there
MOST_TRIES = 3  # an engine that was started again in between forgot what it was told
WATCH = timedelta(hours=1)  # for a first request
RECORDS_COME = timedelta(seconds=10)  # a request is recorded when it ends: an earlier token may be recorded later

Client = Callable[[str], WeightsClient]
SleepVerbs = Callable[[str], SleepClient]
CALLS = LongCalls()


class Asked(NamedTuple):
    """How engines are talked to."""

    weights: Client
    sleep: SleepVerbs
    calls: LongCalls


def look(
    fleet: list[FleetMessage],
    client: Client | None = None,
    sleep: SleepVerbs = SleepClient,
    calls: LongCalls = CALLS,
) -> list[Decision]:
    """All open actions that nobody holds, once; the decisions of those that ended."""
    ask = Asked(client or (lambda url: WeightsClient(url, settings.FLEET_TOKEN)), sleep, calls)
    utilisation = {item["id"]: item["utilisation"] for message in fleet for item in message["instances"]}
    ended = []
    for action_id in actions_open():
        try:
            action = action_lease(action_id=action_id)
            if action is not None:
                decision = _look_at(action, utilisation, ask)
                ended += [decision] if decision is not None else []
        except Error:  # one action's trouble is not the others'; its lease runs out
            log.exception("action %s: look failed", action_id)
    return ended


def _look_at(action: Action, utilisation: Mapping[str, float], ask: Asked) -> Decision | None:
    if action.kind == Action.Kind.FIRST_SERVED:
        return _first_served(action)
    hindered = _hindered(action)
    told = action.kind == Action.Kind.ROLE_SWITCH and role_switches.under_way(action, ask.calls)
    if hindered is not None and not told:  # whatever it was told it must be known to have become
        return _failed(action, *hindered)
    row = action.instance
    if row.observed_state != Instance.Observed.READY or not row.url:
        return _later(action, f"its process is {row.observed_state}")
    if action.kind == Action.Kind.ROLE_SWITCH:
        return role_switches.look_at(action, ask.calls)
    if action.kind == Action.Kind.WEIGHTS_LOAD:
        return _load(action, ask.weights(row.url), utilisation)
    verbs = SglangSleepClient if row.backend == "sglang" else ask.sleep
    return sleeping.look_at(action, verbs(row.url), ask.calls)


def _load(action: Action, engine: WeightsClient, utilisation: Mapping[str, float]) -> Decision | None:
    try:
        return _weights(action, engine, utilisation)
    except EngineAway as error:
        return _later(action, str(error))
    except EngineRefuses as error:
        # Busy with somebody else's load: what comes of it shows at the next look.
        return _later(action, str(error)) if error.busy else _failed(action, "engine_refused", str(error))


def _hindered(action: Action) -> tuple[str, str] | None:
    """Reason and error of what makes it pointless to go on."""
    wanted = action.instance.desired_state
    if wanted != Instance.Desired.RUNNING:
        return "instance_not_wanted", f"the instance is wanted {wanted}"
    if action.kind == Action.Kind.WEIGHTS_LOAD and timezone.now() - action.created_at > LOAD_TIMEOUT:
        return "timeout", f"no weights within {LOAD_TIMEOUT.total_seconds():.0f} s; {action.error}"
    return None


def _later(action: Action, error: str = "", **fields: Any) -> None:
    action_keep(action=action, error=error, **fields)


def _weights(action: Action, engine: WeightsClient, utilisation: Mapping[str, float]) -> Decision | None:
    said = engine.look()
    mine = action.tries > 0 and said.order == _name(action)
    if said.state == "present":
        return _present(action, said, mine)
    if said.state == "loading":
        return _later(action, state=Action.State.RUNNING)
    if mine:
        return _failed(action, "no_source", _last_error(said.attempts), said.attempts)
    if action.tries >= MOST_TRIES:
        return _failed(action, "engine_forgot", f"told {action.tries} times, and it knows of none")
    if not _plan(action, utilisation, said.host_copy):
        return None
    engine.order_load(_name(action), action.params["told"])
    return _later(action)


def _plan(action: Action, utilisation: Mapping[str, float], host_copy: bool) -> bool:
    """What it will be told, stored before it is told. False: the action is somebody else's by now."""
    params: dict[str, Any] = dict(action.params)
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
    reason = f"from_{good['kind']}" if good else "present_already"
    return _end(action, Action.State.DONE, reason, outcome, "", attempts)


def _failed(action: Action, reason: str, error: str, said: list[Mapping[str, Any]] | None = None) -> Decision | None:
    if action.kind == Action.Kind.ROLE_SWITCH:
        return role_switches.give_up(action, reason, error)
    if action.kind != Action.Kind.WEIGHTS_LOAD:
        return sleeping.give_up(action, reason, error)
    attempts = _named(action, said or [])
    return _end(action, Action.State.FAILED, reason, {"error": error, "attempts": attempts}, error, attempts)


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


def _first_served(action: Action) -> Decision | None:
    """Time from the order to the first token that the new instance gave, and where its weights came from."""
    row, asked = action.instance, action.params["scale_out"]
    at = first_token_at(row, action.created_at)
    now = timezone.now()
    if at is not None and now - at < RECORDS_COME:
        at = None
    elif at is None and row.weights == Weights.ASLEEP:
        return _served(action, Action.State.FAILED, "slept_before", {}, "it was put to sleep before it served")
    elif at is None and row.desired_state == Instance.Desired.STOPPED:
        return _served(action, Action.State.FAILED, "stopped_before", {}, "it was stopped before it served")
    elif at is None and now - action.created_at > WATCH:
        return _served(action, Action.State.FAILED, "never_served", {}, "no request came to it")
    if at is None:
        return _later(action, state=Action.State.RUNNING)
    served = {"first_served_s": round((at - action.created_at).total_seconds(), 3)}
    if row.ready_at is not None and not asked.get("warm"):
        served["ready_s"] = round((row.ready_at - action.created_at).total_seconds(), 3)
    how = "woken" if asked.get("woken") else "warm" if asked.get("warm") else "started"
    return _served(action, Action.State.DONE, how, served, "")


def _served(action: Action, state: str, reason: str, outcome: dict[str, Any], error: str) -> Decision | None:
    kinds = ("weights_load", "instance_awake")
    loads = Decision.objects.filter(
        kind__in=kinds, subject_type="instance", subject=action.instance_id, at__gte=action.created_at
    )
    load = loads.order_by("at").first()
    if load is not None:
        names = ("source", "from", "load_s", "bytes")
        outcome |= {name: load.outcome[name] for name in names if name in load.outcome}
    asked = action.params["scale_out"]
    return action_end(
        action=action,
        state=state,
        kind="scale_out_served" if state == Action.State.DONE else "scale_out_unserved",
        subject=("scaling_policy", asked["policy"]),
        reason=reason,
        inputs={"instance": action.instance_id, "scale_out": asked.get("decision")},
        outcome=outcome,
        error=error,
    )


def _named(action: Action, attempts: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As the engine tells them, with the instance behind each url."""
    ids = {each.get("url", ""): each.get("id", "") for each in action.params.get("told", [])}
    return [
        {
            "kind": str(each.get("kind", "")),
            "url": str(each.get("url", "")),
            "source": ids.get(each.get("url", ""), "") if each.get("url") else "",
            "seconds": round(float(each.get("seconds", 0.0)), 4),
            "bytes": int(each.get("bytes", 0)),
            "error": str(each.get("error", "")),
        }
        for each in attempts
    ]


def _last_error(attempts: list[Mapping[str, Any]]) -> str:
    said = [f"{each.get('kind')}: {each.get('error')}" for each in attempts if each.get("error")]
    return "; ".join(said) or "the load ended without weights and without a reason"
