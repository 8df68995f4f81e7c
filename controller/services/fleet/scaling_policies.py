"""Scaling policies, and the state that the scaler keeps between ticks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import connection
from django.utils import timezone

from controller.core.errors import ConfigError
from controller.models import ScalerState, ScalingPolicy, ServedModel
from controller.scale.config import ScalingConfig
from controller.services import change
from controller.services.actors import Actor
from controller.services.replace import ExpectedVersion, defaults_of, put

LOCK_CLASS = 7301  # advisory locks (class, policy id): one tick of a policy at a time, however many workers run
SHORTEST_INTERVAL_S = 1.0  # between two ticks of Celery beat
EDITABLE = (
    "min_instances", "max_instances", "upper", "lower", "sustain_s", "cooldown_s", "interval_s", "warm",
    "sleep_level", "enabled",
)  # fmt: skip
HELD = ("held_instances", "held_until", "held_for")
HELD_MAX = 1000  # instances
LONGEST_HOLD = timedelta(days=7)


def scaling_policy_create(
    *,
    actor: Actor,
    model: ServedModel,
    role: str = "collocated",
    min_instances: int = 1,
    max_instances: int = 4,
    upper: float = 0.8,
    lower: float = 0.3,
    sustain_s: float = 15.0,
    cooldown_s: float = 10.0,
    interval_s: float = 1.0,
    warm: int | None = None,
    sleep_level: int = 0,
    enabled: bool = True,
) -> ScalingPolicy:
    row = ScalingPolicy(
        model=model,
        role=role,
        min_instances=min_instances,
        max_instances=max_instances,
        upper=upper,
        lower=lower,
        sustain_s=sustain_s,
        cooldown_s=cooldown_s,
        interval_s=interval_s,
        warm=warm,
        sleep_level=sleep_level,
        enabled=enabled,
    )
    return change.create(row, actor=actor, kind="scaling_policy", check=_check)


def scaling_policy_update(
    *, actor: Actor, policy_id: int, version: int | None, changes: Mapping[str, Any]
) -> ScalingPolicy:
    return change.update(
        ScalingPolicy,
        policy_id,
        actor=actor,
        kind="scaling_policy",
        version=version,
        changes=changes,
        editable=EDITABLE,
        check=_check,
    )


def scaling_policy_hold(
    *, actor: Actor, policy_id: int, version: int | None, instances: int, until: datetime, reason: str
) -> ScalingPolicy:
    """Keep exactly so many instances until then, whatever the load is. Another hold is replaced. Raises
    ValidationError, also for a disabled policy, which the scaler does not look at."""

    def check(row: ScalingPolicy) -> None:
        if not row.enabled:
            raise ValidationError("The policy is disabled, so the scaler would not act on it. Enable it first.")
        if not 1 <= instances <= HELD_MAX:
            raise ValidationError({"instances": f"Must be between 1 and {HELD_MAX}."})
        if not timedelta(0) < until - timezone.now() <= LONGEST_HOLD:
            raise ValidationError({"until": f"Must be in the future, at most {LONGEST_HOLD.days} days ahead."})
        if not reason.strip():
            raise ValidationError({"reason": "Say why: the audit and the page Scaling show it."})

    return change.update(
        ScalingPolicy,
        policy_id,
        actor=actor,
        kind="scaling_policy",
        version=version,
        changes={"held_instances": instances, "held_until": until, "held_for": reason.strip()},
        editable=HELD,
        check=check,
        gateways=False,
    )


def scaling_policy_release(*, actor: Actor, policy_id: int, version: int | None = None) -> ScalingPolicy:
    """Let the scaler go by load again. Without a hold nothing changes."""
    return change.update(
        ScalingPolicy,
        policy_id,
        actor=actor,
        kind="scaling_policy",
        version=version,
        changes={"held_instances": None, "held_until": None, "held_for": ""},
        editable=HELD,
        gateways=False,
    )


def scaling_policy_put(
    *, actor: Actor, model: ServedModel, role: str, values: Mapping[str, Any], expected: ExpectedVersion
) -> tuple[ScalingPolicy, bool]:
    """Create the policy or replace its values; whether it was created. Absent values get their default, except
    `enabled`: a policy that an operator has disabled stays disabled until somebody says otherwise."""

    absent = defaults_of(ScalingPolicy, values, EDITABLE, kept=("enabled",))

    def change_to(row: ScalingPolicy) -> ScalingPolicy:
        return scaling_policy_update(actor=actor, policy_id=row.pk, version=row.version, changes={**absent, **values})

    return put(
        ScalingPolicy,
        {"model": model, "role": role},
        expected=expected,
        absent=absent,
        create=lambda: scaling_policy_create(actor=actor, model=model, role=role, **values),
        change=change_to,
    )


def scaling_policy_remove(*, actor: Actor, policy_id: int, version: int | None = None) -> None:
    change.remove(ScalingPolicy, policy_id, actor=actor, kind="scaling_policy", version=version)


def scaling_config(row: ScalingPolicy) -> ScalingConfig:
    """The settings that the scaler decides by now. Raises ConfigError naming the field."""
    least, most = row.bounds(timezone.now())
    return ScalingConfig(
        model=row.model.name,
        role=row.role,
        min_instances=least,
        max_instances=most,
        upper=row.upper,
        lower=row.lower,
        sustain_s=row.sustain_s,
        cooldown_s=row.cooldown_s,
        interval_s=row.interval_s,
    )


def scaler_state_save(*, policy: ScalingPolicy, state: Mapping[str, Any]) -> ScalerState:
    """Store the state that the scaler returned, in the transaction that records its Decision. Counts the tick."""
    row, _ = ScalerState.objects.get_or_create(policy=policy)
    row.state, row.tick = dict(state), row.tick + 1
    row.save(update_fields=["state", "tick", "updated_at"])
    return row


def scaler_lock(policy_id: int) -> bool:
    """Lock the policy until the transaction ends. False: another worker ticks it now."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [LOCK_CLASS, policy_id])
        return bool(cursor.fetchone()[0])


def _check(row: ScalingPolicy) -> None:
    if row.interval_s < SHORTEST_INTERVAL_S:
        message = f"Must be at least {SHORTEST_INTERVAL_S:g} s, the shortest interval at which policies are evaluated."
        raise ValidationError({"interval_s": message})
    if row.max_instances < max(1, row.min_instances):  # a hold must not hide it
        raise ValidationError({"max_instances": "Must be at least 1, and not below the minimum."})
    try:
        scaling_config(row)
    except ConfigError as error:
        raise ValidationError({error.field or "__all__": str(error)}) from error
