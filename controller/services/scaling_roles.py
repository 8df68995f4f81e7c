"""Instances that prefill and decode give one another, by the planner that the simulator runs too (scale.roles)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from controller.core.decisions import Decision as Decided
from controller.core.messages import FleetMessage
from controller.models import Decision, ScalerState, ScalingPolicy
from controller.models.fleet import Role
from controller.scale.roles import SwitchRole, switch
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.role_switches import role_ask
from controller.services.scaling_policies import scaler_lock
from controller.services.scaling_stages import Stage, stage_of

OTHER_STAGE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class Given(NamedTuple):
    """An instance that the other stage can spare."""

    action: SwitchRole
    decided: Decided
    giving: ScalingPolicy


def given(stage: Stage, fleet: Sequence[FleetMessage], now: float) -> Given | None:
    """Of prefill and decode, what the one that has too little to do gives to `stage`; None: nothing now."""
    other = OTHER_STAGE.get(stage.policy.role)
    giving = (
        ScalingPolicy.objects.select_related("model").filter(model=stage.policy.model, role=other, enabled=True).first()
        if other
        else None
    )
    if giving is None or not scaler_lock(giving.pk):
        return None
    row = ScalerState.objects.filter(policy=giving).first()
    theirs = stage_of(giving, fleet, now)
    since = row.state.get("spare_since") if row else None
    found = switch(theirs.config, theirs.seen, since, stage.config, stage.seen.load, now)
    return None if found is None else Given(*found, giving)


def switch_role(given: Given, *, actor: Actor) -> Decision:
    """Without a restart; at once, or when its engine has switched. The giver's hold and pause begin anew."""
    action, decided, giving = given
    decision = decision_record(
        actor=actor,
        kind=decided.kind,
        subject_type="scaling_policy",
        subject=decided.subject,
        reason=decided.reason,
        inputs=dict(decided.figures),
        outcome={"instance": action.instance_id, "role": action.role},
    )
    role_ask(actor=actor, instance_id=action.instance_id, role=action.role)
    row = ScalerState.objects.filter(policy=giving).first()
    if row is not None:
        anew = {"changed_at": decided.at, "low_since": None, "spare_since": None}
        ScalerState.objects.filter(policy=giving).update(state={**row.state, **anew})
    return decision
