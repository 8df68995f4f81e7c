"""One tick of the scaler for one policy: lock, look, decide, act and record in a single transaction.

A worker killed anywhere in it leaves nothing; a tick that was applied has moved the state's tick number, which is the
Decision's idempotency key, so none is applied twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from controller.core.decisions import Decision as Decided
from controller.core.messages import FleetMessage
from controller.models import Decision, Instance, ScalerState, ScalingPolicy, ScalingSample
from controller.scale import Drain, ScaleOut, Scaler, Undrain
from controller.scale import ScalerState as Memory
from controller.scale.load import FleetObservation
from controller.scale.observation import Row, observe
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.instances import instance_drain, instance_undrain, instance_wish
from controller.services.scaling_policies import scaler_state_save, scaling_config

LOCK_CLASS = 7301  # advisory locks (class, policy id): one tick of a policy at a time, whatever the number of workers
STARTABLE = ("process",)  # provisioners that can make another instance
SCALER = Actor.job("scaler")
EARLY_S = 0.25  # beat's jitter: a tick this much before its time counts
NOT_COPIED = ("start_after",)
SAMPLE_S = 5.0  # between two points of the line that pages draw
SAMPLES_KEPT_DAYS = 7


def scaler_tick(*, policy_id: int, fleet: Sequence[FleetMessage], now: float) -> Decision | None:
    """`now` is epoch seconds. None: nothing worth a Decision, not due yet, or somebody else is at it."""
    with transaction.atomic():
        if not _locked(policy_id):
            return None
        policy = ScalingPolicy.objects.select_related("model").filter(pk=policy_id, enabled=True).first()
        if policy is None or not _due(policy):
            return None
        rows = list(Instance.objects.live().filter(model=policy.model, role=policy.role).order_by("id"))
        pattern = _pattern(policy, rows)
        seen = _look(rows, fleet, policy, pattern, now)
        row = ScalerState.objects.filter(policy=policy).first()
        memory = Memory.from_json(row.state if row else {})
        memory, actions, decided = Scaler().decide(scaling_config(policy), memory, seen, now)
        scaler_state_save(policy=policy, state=memory.to_json())
        if decided or memory.ticks % _ticks_a_sample(policy) == 0:
            _sample(policy, memory, seen, now)
        return _apply(policy, pattern, actions, decided) if decided else None


def _ticks_a_sample(policy: ScalingPolicy) -> int:
    return max(1, round(SAMPLE_S / policy.interval_s))


def _sample(policy: ScalingPolicy, memory: Memory, seen: FleetObservation, now: float) -> None:
    """The point of this tick on the policy's line."""
    low_since, changed_at = memory.low_since, memory.changed_at
    ScalingSample.objects.create(
        policy=policy,
        at=datetime.fromtimestamp(now, tz=UTC),
        load=None if seen.stale else memory.load,
        ready=len(seen.having("ready")),
        starting=len(seen.having("starting")),
        draining=len(seen.having("draining")),
        mind=memory.mind,
        low_for_s=0.0 if low_since is None else max(0.0, now - low_since + policy.interval_s),
        cooldown_left_s=0.0 if changed_at is None else max(0.0, changed_at + policy.cooldown_s - now),
    )


def samples_retain(*, days: int, now: datetime | None = None) -> int:
    """Forget samples older than `days` days; returns how many went. Decisions stay."""
    if days < 1:
        raise ValueError("days: at least 1")
    return ScalingSample.objects.filter(at__lt=(now or timezone.now()) - timedelta(days=days)).delete()[0]


def _locked(policy_id: int) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [LOCK_CLASS, policy_id])
        return bool(cursor.fetchone()[0])


def _due(policy: ScalingPolicy) -> bool:
    last = ScalerState.objects.filter(policy=policy).values_list("updated_at", flat=True).first()
    return last is None or timezone.now() - last >= timedelta(seconds=policy.interval_s - EARLY_S)


def _pattern(policy: ScalingPolicy, rows: Sequence[Instance]) -> Instance | None:
    """What another instance is made like: the newest of ours, if need be one that is gone."""
    ours = [row for row in rows if row.provisioner in STARTABLE]
    if ours:
        return max(ours, key=lambda row: row.created_at)
    past = Instance.objects.filter(model=policy.model, role=policy.role, provisioner__in=STARTABLE)
    return past.order_by("-created_at").first()


def _look(
    rows: Sequence[Instance], fleet: Sequence[FleetMessage], policy: ScalingPolicy, pattern: Instance | None, now: float
) -> FleetObservation:
    known = [Row(r.id, r.desired_state, r.observed_state, r.provisioner not in STARTABLE) for r in rows]
    return observe(known, fleet, now, policy.model.name, startable=pattern is not None, role=policy.role)


def _apply(
    policy: ScalingPolicy, pattern: Instance | None, actions: Sequence[Any], decided: Decided
) -> Decision | None:
    new_ids = [_new_id(pattern) for action in actions if isinstance(action, ScaleOut) for _ in range(action.instances)]
    decision = decision_record(
        actor=SCALER,
        kind=decided.kind,
        subject_type="scaling_policy",
        subject=decided.subject,
        reason=decided.reason,
        inputs=dict(decided.figures),
        outcome={"started": new_ids} if new_ids else {},
        rejected=dict(decided.rejected),
        idempotency_key=f"scaler:{policy.pk}:{decided.figures['tick']}",
    )
    if not decision.is_new:
        return None
    for new_id in new_ids:
        instance_wish(actor=SCALER, id=new_id, model=policy.model, **like(pattern))
    for action in actions:
        if isinstance(action, Drain):
            instance_drain(actor=SCALER, instance_id=action.instance_id)
        elif isinstance(action, Undrain):
            instance_undrain(actor=SCALER, instance_id=action.instance_id)
    return decision


def _new_id(pattern: Instance | None) -> str:
    return f"{pattern.backend if pattern else 'instance'}-{secrets.token_hex(3)}"


def like(pattern: Instance | None) -> dict[str, Any]:
    """Arguments of instance_wish for another instance of the same kind. Without a pattern the scaler does not ask."""
    if pattern is None:
        raise ValueError("no instance to take as the pattern")
    return {
        **{name: getattr(pattern, name) for name in ("backend", "provisioner", "role", "host", "device_kind", "tp")},
        "max_num_seqs": pattern.max_num_seqs,
        "unit_cost": pattern.unit_cost,
        "spec": {name: value for name, value in pattern.spec.items() if name not in NOT_COPIED},
    }
