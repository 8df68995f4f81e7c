"""Role switches of instances: at once if the role only changes routing, by an order if the engine must be told.

SGLang must be told its disaggregation mode, and a reference engine whose role chose its scheduler too. The order is
stored here and carried out by `workers.actions.role_switches`. While it is open, gateways send nothing new there. It
ends with the new role, or with the old one and the reason on the Decision. An engine that broke during the switch is
out of the fleet until a person restarts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction

from controller.core.types import Role as CoreRole
from controller.models import Action, Decision, Instance, ServedModel
from controller.models.fleet import KvRole, Role, Weights
from controller.policies.by_stage import BY_STAGE, scheduler_of
from controller.services import change
from controller.services.actors import Actor
from controller.services.config import config_version_raise
from controller.services.fleet.actions import Kind, State, action_end, action_order
from controller.services.fleet.instances import instance_locked, instance_observe, instance_set_role, instance_stop

SWITCHED = ("sglang",)  # backends whose engines must be told
ROUTED = ("reference",)  # backends whose engines serve either stage of a request at any time
CANNOT_DO_BOTH = ("sglang",)  # backends whose engines cannot be collocated and switch


def role_order(*, actor: Actor, instance_id: str, role: str, version: int | None = None) -> Action | None:
    """Give an instance a role: at once if that only changes routing (returns None), else by an action that switches its
    engine.

    Idempotent: an open action for the same role is returned. Raises DoesNotExist, VersionConflict, and ValidationError
    naming the field.
    """
    with transaction.atomic():
        row = instance_locked(instance_id, version)
        if not must_be_told(row) or row.role == role or role not in Role.values:
            instance_set_role(actor=actor, instance_id=instance_id, role=role, version=version)
            return None
        there = Action.objects.filter(instance=row, kind=Kind.ROLE_SWITCH, state__in=Action.OPEN).first()
        if there is not None:
            if there.params["role"] != role:
                raise ValidationError({"role": f"{row} is already switching to {there.params['role']}."})
            return there
        _check(row, role)
        action = action_order(actor, row, Kind.ROLE_SWITCH, {"role": role, "from": row.role})
        inputs = {"before": {"role": row.role}, "after": {"role": role}, "action": action.pk}
        change.audit(actor, "instance", "role_switch_ordered", row, inputs)
        config_version_raise()
    return action


def must_be_told(row: Instance) -> bool:
    """Whether its engine changes with its role. Not one whose options say how it batches, or that was started
    collocated; one that was not started yet starts in the new role."""
    if row.backend == "reference":
        return bool(row.started_role) and scheduler_of(row.spec, CoreRole(row.role_at_start)) == BY_STAGE
    return row.backend in SWITCHED


def takes_both(row: Instance) -> bool:
    """Whether the scaler may give it the other stage's role. An engine that must be told reports whether it can. A vLLM
    server does not report for which side of a KV transfer it was started, so its registration must (`kv_role`)."""
    if row.backend == "vllm":
        return row.kv_role == KvRole.BOTH
    return row.backend in SWITCHED or row.backend in ROUTED


def roles_ordered(model: ServedModel) -> dict[str, str]:
    """By instance of the model, the role of its open order."""
    orders = Action.objects.filter(instance__model=model, kind=Kind.ROLE_SWITCH, state__in=Action.OPEN)
    return {name: params["role"] for name, params in orders.values_list("instance_id", "params")}


def role_switched(*, action: Action, inputs: Mapping[str, Any], outcome: Mapping[str, Any]) -> Decision | None:
    """The engine has switched: the instance gets the role, and requests of that stage."""
    role = action.params["role"]
    with transaction.atomic():
        decision = _end(action, State.DONE, "switched", inputs, outcome)
        if decision is not None:
            instance_set_role(actor=Actor(action.actor, action.actor_type), instance_id=action.instance_id, role=role)
            # The engine runs this role's scheduler from now on.
            Instance.objects.filter(pk=action.instance_id).exclude(started_role="").update(started_role=role)
            config_version_raise()
    return decision


def role_kept(
    *, action: Action, reason: str, error: str, field: str, restorable: bool, inputs: Mapping[str, Any]
) -> Decision | None:
    """The engine has not switched. `restorable`: requests of its old role go there again; otherwise it has failed."""
    outcome = {"error": error, "field": field, "safe_to_restore": restorable, "role": action.params["from"]}
    with transaction.atomic():
        decision = _end(action, State.FAILED, reason, inputs, outcome, error)
        if decision is not None and not restorable:
            instance_observe(
                instance_id=action.instance_id, observed_state=Instance.Observed.FAILED, error=f"{reason}: {error}"
            )
            instance_stop(actor=Actor(action.actor, action.actor_type), instance_id=action.instance_id)
        if decision is not None:
            config_version_raise()
    return decision


def _end(
    action: Action, state: str, reason: str, inputs: Mapping[str, Any], outcome: Mapping[str, Any], error: str = ""
) -> Decision | None:
    return action_end(
        action=action,
        state=state,
        kind="role_switch" if state == State.DONE else "role_switch_failed",
        subject=("instance", action.instance_id),
        reason=reason,
        inputs=inputs,
        outcome=outcome,
        error=error,
    )


def _check(row: Instance, role: str) -> None:
    if row.backend in CANNOT_DO_BOTH and Role.COLLOCATED in (row.role, role):
        raise ValidationError(
            {
                "role": f"SGLang cannot switch from {row.role} to {role} while running, only between prefill and "
                "decode. Start a server in that role and register it."
            }
        )
    if row.desired_state != Instance.Desired.RUNNING:
        raise ValidationError({"desired_state": f"The desired state of {row} is {row.desired_state}; must be running."})
    if row.observed_state != Instance.Observed.READY or row.weights != Weights.PRESENT:
        raise ValidationError({"observed_state": f"{row} is {row.shown_state}; must be ready to switch its role."})
