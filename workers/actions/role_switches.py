"""One look at an instance whose engine shall take another role: wait until it is empty, tell it, record.

Gateways stop sending when the order is written (their configuration says so), what runs there ends, then the adapter
checks the engine's preconditions, tries the switch dry and does it. That call takes seconds and lives in a thread of
one worker, which leaves its mark; one that was lost with its worker is made again, for an engine that has the role
already says so. An order is not given up while its call is under way, and one whose engine was told ends with the role
that the engine says it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from django.utils import timezone

from controller.core.types import InstanceSpec, Role
from controller.models import Action, Decision, Instance
from controller.scale.lifecycle import SETTLE_S
from controller.services.actions import action_keep
from controller.services.role_switches import role_kept, role_switched
from workers.actions.long_calls import LongCall, LongCalls, call_mark, goes_on_elsewhere
from workers.backends.base import Backend, EngineError, Limits, NotSupported, RoleRefused
from workers.backends.registry import ask

TIMEOUT = timedelta(minutes=5)  # for what runs there to end; longer answers are not worth an instance that waits
MOST_TRIES = 20  # of a call that was made and came to nothing
LIMITS = Limits(telemetry_s=5.0, control_s=120.0)

Switch = Callable[[InstanceSpec, Role, InstanceSpec | None], None]
RoleOf = Callable[[InstanceSpec], Role]


def switch(spec: InstanceSpec, role: Role, peer: InstanceSpec | None) -> None:
    """Raises RoleRefused, EngineError. `peer`: an engine in that role, whose settings it takes over."""
    settings: Mapping[str, Any] = {}
    if peer is not None:
        try:
            settings = ask(peer, lambda backend: backend.role_settings(), LIMITS)
        except EngineError:  # without them the engine says itself what it lacks
            settings = {}

    async def work(backend: Backend) -> None:
        await backend.set_role(role, settings)

    ask(spec, work, LIMITS)


def role_of(spec: InstanceSpec) -> Role:
    """That its engine has. Raises EngineError."""
    return ask(spec, lambda backend: backend.role(), LIMITS)


def under_way(action: Action, calls: LongCalls) -> bool:
    """Its engine is being told, here or by another worker."""
    return calls.find(action.pk) is not None or goes_on_elsewhere(action.params.get("call"))


def look_at(action: Action, calls: LongCalls, switch: Switch = switch, role_of: RoleOf = role_of) -> Decision | None:
    """The Decision if this look ended it."""
    if calls.find(action.pk) is None:
        age_s = (timezone.now() - action.created_at).total_seconds()
        # Before SETTLE_S a gateway may not know yet, and send.
        if age_s < SETTLE_S or goes_on_elsewhere(action.params.get("call")):
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
    """It has become pointless. An engine that was told may have switched all the same, and only it can say."""
    if action.params.get("told") and not _stopped(action):
        try:
            has = role_of(_spec(action.instance))
        except EngineError as unknown:
            if action.instance.desired_state != Instance.Desired.RUNNING:
                return _kept(action, reason, error)
            return _later(action, f"{reason}, and it does not say which role it has: {unknown}")
        if has == action.params["role"]:
            outcome = {"role": action.params["role"], "after": reason}
            return role_switched(action=action, inputs=_inputs(action), outcome=outcome)
    return _kept(action, reason, error)


def _stopped(action: Action) -> bool:
    """Then no role is of any meaning."""
    return action.instance.desired_state == Instance.Desired.STOPPED


def _answered(action: Action, error: Exception | None, seconds: float) -> Decision | None:
    if error is None and _stopped(action):
        return _kept(action, "instance_not_wanted", "the instance was stopped meanwhile")
    if error is None:
        outcome = {"role": action.params["role"], "switch_s": round(seconds, 3)}
        return role_switched(action=action, inputs=_inputs(action), outcome=outcome)
    if isinstance(error, RoleRefused):
        # Not idle is nobody's failure: it is looked at again until the time-out. What was told and refused counts.
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
    """Another look: no Decision yet."""
    tries = action.tries if tries is None else tries
    action_keep(action=action, error=error, state=Action.State.RUNNING, tries=tries, params=action.params)
    return None


def _call(action: Action, calls: LongCalls, switch: Switch) -> LongCall | None:
    """The one under way here, or a new one; marked, so that no other worker makes it meanwhile. None: the action is
    somebody else's by now."""
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
    return InstanceSpec(row.pk, row.model.name, url=row.url, backend=row.backend, role=Role(row.role))


def _peer(row: Instance, role: str) -> InstanceSpec | None:
    """A serving engine of the same kind and model in that role."""
    peers = Instance.objects.serving().select_related("model").filter(model=row.model, backend=row.backend, role=role)
    found = peers.exclude(pk=row.pk).order_by("pk").first()
    return None if found is None else _spec(found)
