"""Advances a role switch of an instance whose engine has to switch itself: waits until it is empty, switches it and
records the result.

Gateways stop sending requests as soon as the action is stored, since their configuration says so. Once the requests in
flight have ended, the backend checks the preconditions of the engine, makes a dry run of the switch, and switches.
That call takes seconds and runs in a thread of one worker, which marks it in the action. If its worker is killed,
another worker makes the call again; an engine that has the role already reports so. An action is not ended while its
call is in progress, and one whose engine was told ends with the role that the engine reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from django.utils import timezone

from controller.core.types import InstanceSpec, Role
from controller.models import Action, Decision, Instance
from controller.scale.lifecycle import SETTLE_S
from controller.services.fleet.actions import action_keep
from controller.services.fleet.role_switches import role_kept, role_switched
from workers.actions.long_calls import LongCall, LongCalls, call_mark, in_progress_elsewhere
from workers.backends.base import Backend, EngineError, Limits, NotSupported, RoleRefused
from workers.backends.registry import ask

TIMEOUT = timedelta(minutes=5)  # for requests in flight to end; for longer ones the switch is given up
MOST_TRIES = 20  # calls without effect
LIMITS = Limits(telemetry_s=5.0, control_s=120.0)

Switch = Callable[[InstanceSpec, Role, InstanceSpec | None], None]
RoleOf = Callable[[InstanceSpec], Role]


def switch(spec: InstanceSpec, role: Role, peer: InstanceSpec | None) -> None:
    """Switch the engine. `peer`: an engine in that role, whose settings it takes. Raises RoleRefused, EngineError."""
    settings: Mapping[str, Any] = {}
    if peer is not None:
        try:
            settings = ask(peer, lambda backend: backend.role_settings(), LIMITS)
        except EngineError:  # without them the engine reports itself which setting is missing
            settings = {}

    async def work(backend: Backend) -> None:
        await backend.set_role(role, settings)

    ask(spec, work, LIMITS)


def role_of(spec: InstanceSpec) -> Role:
    """The role that the engine reports. Raises EngineError."""
    return ask(spec, lambda backend: backend.role(), LIMITS)


def in_progress(action: Action, calls: LongCalls) -> bool:
    """Whether a worker, this one or another, is switching the engine now."""
    return calls.find(action.pk) is not None or in_progress_elsewhere(action.params.get("call"))


def advance(action: Action, calls: LongCalls, switch: Switch = switch, role_of: RoleOf = role_of) -> Decision | None:
    """Advance the action once; returns its Decision if it ended."""
    if calls.find(action.pk) is None:
        age_s = (timezone.now() - action.created_at).total_seconds()
        # Until SETTLE_S has passed, a gateway may not know of the order yet and still send requests.
        if age_s < SETTLE_S or in_progress_elsewhere(action.params.get("call")):
            return _later(action, action.error)
        if action.tries >= MOST_TRIES:
            return give_up(action, "no_effect", f"told {action.tries} times; {action.error}", role_of)
    call = _call(action, calls, switch)
    if call is None:
        return None
    if not call.done:
        return _later(action)
    calls.forget(action.pk)
    action.params = {name: value for name, value in action.params.items() if name != "call"}
    return _answered(action, call.error, call.seconds)


def give_up(action: Action, reason: str, error: str, role_of: RoleOf = role_of) -> Decision | None:
    """End an action that failed or is no longer needed. An engine that was told may have switched nevertheless, so it
    is asked for its role."""
    if action.params.get("told") and not _stopped(action):
        try:
            has = role_of(_spec(action.instance))
        except EngineError as unknown:
            if action.instance.desired_state != Instance.Desired.RUNNING:
                return _kept(action, reason, error)
            return _later(action, f"{reason}, and the engine does not report its role: {unknown}")
        if has == action.params["role"]:
            outcome = {"role": action.params["role"], "after": reason}
            return role_switched(action=action, inputs=_inputs(action), outcome=outcome)
    return _kept(action, reason, error)


def _stopped(action: Action) -> bool:
    """Whether the instance was stopped, so that its role no longer matters."""
    return action.instance.desired_state == Instance.Desired.STOPPED


def _answered(action: Action, error: Exception | None, seconds: float) -> Decision | None:
    if error is None and _stopped(action):
        return _kept(action, "instance_not_wanted", "the instance was stopped meanwhile")
    if error is None:
        outcome = {"role": action.params["role"], "switch_s": round(seconds, 3)}
        return role_switched(action=action, inputs=_inputs(action), outcome=outcome)
    if isinstance(error, RoleRefused):
        # An engine that is not idle has not failed, so that does not count as a try and is retried until the timeout.
        if error.again and error.restorable:
            return _later(action, str(error), tries=action.tries + (error.reason != "not_idle"))
        return _kept(action, error.reason, str(error), error.field, restorable=error.restorable)
    if isinstance(error, NotSupported):
        return _kept(action, "not_supported", str(error), error.field)
    return _later(action, f"{type(error).__name__}: {error}", tries=action.tries + 1)


def _kept(action: Action, reason: str, error: str, field: str = "", *, restorable: bool = True) -> Decision | None:
    return role_kept(
        action=action, reason=reason, error=error, field=field, restorable=restorable, inputs=_inputs(action)
    )


def _later(action: Action, error: str = "", *, tries: int | None = None) -> Decision | None:
    """Store the progress; the next run continues. There is no Decision yet."""
    tries = action.tries if tries is None else tries
    action_keep(action=action, error=error, state=Action.State.RUNNING, tries=tries, params=action.params)
    return None


def _call(action: Action, calls: LongCalls, switch: Switch) -> LongCall | None:
    """The call in progress in this process, or a new one, marked so that no other worker makes it meanwhile. None:
    another worker holds the action now."""
    there = calls.find(action.pk)
    if there is not None and there.done:
        return there
    params = {**action.params, "call": call_mark(), "told": True}
    kept = action_keep(action=action, release=False, params=params)
    if there is not None or not kept:
        return there
    row = action.instance
    spec, role, peer = _spec(row), Role(action.params["role"]), _peer(row, action.params["role"])
    return calls.begin(action.pk, lambda: switch(spec, role, peer))


def _inputs(action: Action) -> dict[str, Any]:
    waited = (timezone.now() - action.created_at).total_seconds()
    params = action.params
    return {"from": params["from"], "to": params["role"], "ordered_s": round(waited, 3), "tries": action.tries}


def _spec(row: Instance) -> InstanceSpec:
    return InstanceSpec(row.pk, row.model.name, url=row.url, backend=row.backend, role=Role(row.role), key=row.key)


def _peer(row: Instance, role: str) -> InstanceSpec | None:
    """A serving engine of the same backend and model in that role; None if there is none."""
    peers = Instance.objects.serving().select_related("model").filter(model=row.model, backend=row.backend, role=role)
    found = peers.exclude(pk=row.pk).order_by("pk").first()
    return None if found is None else _spec(found)
