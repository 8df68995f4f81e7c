"""One tick of the scaler for one policy: lock, observe, decide, act and record in a single transaction.

How many instances are needed is decided by `controller.scale.scaler`; which ones come and go, by
`controller.scale.capacity_plan`; this module carries the plan out. A worker killed in the middle leaves nothing behind.
A tick that was applied has moved the scaler's tick number, which is the Decision's idempotency key, so no tick is
applied twice.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from controller.core.decisions import Decision as Decided
from controller.core.messages import FleetMessage
from controller.models import Decision, Instance, ScalerState, ScalingPolicy, ScalingSample
from controller.scale import Drain, ScaleAction, ScaleOut, Scaler, ScalerMemory, Undrain
from controller.scale.capacity_plan import (
    CapacityPlan,
    LoadWeights,
    PutToSleep,
    StartNew,
    Step,
    WakeUp,
    plan_capacity,
)
from controller.scale.load import FleetObservation
from controller.scale.role_changes import SwitchRole
from controller.scale.warm_pool import refill
from controller.selectors.fleet.weights import weight_plan
from controller.services.actors import SCALER
from controller.services.decisions import decision_record
from controller.services.fleet.actions import first_served_watch, weights_load_order
from controller.services.fleet.instances import instance_create, instance_drain, instance_stop, instance_undrain
from controller.services.fleet.role_switches import role_order
from controller.services.fleet.scaling_policies import scaler_lock, scaler_state_save
from controller.services.fleet.scaling_stages import (
    StageView,
    like,
    loads_separately,
    pool_target,
    spare_of,
    stage_of,
    with_other_stage,
)
from controller.services.fleet.sleeping import sleep_order, wake_order

log = logging.getLogger(__name__)

EARLY_S = 0.25  # beat's jitter: a tick that comes this much early counts as due
SAMPLE_S = 5.0  # between two points of the line that pages draw
SAMPLES_KEPT_DAYS = 7


def scaler_tick(*, policy_id: int, fleet: Sequence[FleetMessage], now: float) -> Decision | None:
    """Tick the policy once. `now`: epoch seconds. None: there was nothing to decide, the policy is not due yet, or
    another worker is ticking it."""
    with transaction.atomic():
        if not scaler_lock(policy_id):
            return None
        policy = ScalingPolicy.objects.select_related("model").filter(pk=policy_id, enabled=True).first()
        if policy is None or not _due(policy):
            return None
        view = stage_of(policy, fleet, now)
        if not view.capacity.can_add(now):
            view = _beside_other_stage(view, fleet, now)
        row = ScalerState.objects.filter(policy=policy).first()
        before = ScalerMemory.from_json(row.state if row else {})
        capacity = view.capacity
        seen = capacity.observation(now)
        memory, actions, decided = Scaler().decide(capacity.config, before, seen, now)
        scaler_state_save(policy=policy, state=memory.to_json())
        if decided or memory.ticks % _ticks_a_sample(policy) == 0:
            _sample(policy, memory, seen, now)
        if decided:
            return _apply(view, actions, decided, fleet, now)
        return _refill_pool(view, memory.ticks)


def _beside_other_stage(view: StageView, fleet: Sequence[FleetMessage], now: float) -> StageView:
    """With what the other stage could give, unless looking at that raises: its policy's fault is not this one's."""
    try:
        with transaction.atomic():
            return with_other_stage(view, fleet, now)
    except Exception:
        log.exception("scaling policy %s: the other stage cannot be evaluated", view.policy.pk)
        return view


def _due(policy: ScalingPolicy) -> bool:
    last = ScalerState.objects.filter(policy=policy).values_list("updated_at", flat=True).first()
    return last is None or timezone.now() - last >= timedelta(seconds=policy.interval_s - EARLY_S)


# ---- samples --------------------------------------------------------------------------------------------------------


def samples_retain(*, days: int, now: datetime | None = None) -> int:
    """Delete samples older than `days` days and return how many. Decisions stay."""
    if days < 1:
        raise ValueError("days: at least 1")
    return ScalingSample.objects.filter(at__lt=(now or timezone.now()) - timedelta(days=days)).delete()[0]


def _ticks_a_sample(policy: ScalingPolicy) -> int:
    return max(1, round(SAMPLE_S / policy.interval_s))


def _sample(policy: ScalingPolicy, memory: ScalerMemory, seen: FleetObservation, now: float) -> None:
    """Store what the scaler saw at this tick, for the chart of the policy."""
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
        start_s=seen.start_s,
    )


# ---- carrying out a plan --------------------------------------------------------------------------------------------


def _apply(
    view: StageView, actions: Sequence[ScaleAction], decided: Decided, fleet: Sequence[FleetMessage], now: float
) -> Decision | None:
    """Record the scaler's Decision with what its plan does, then do it. None: this tick was applied before."""
    if view.giving is None and any(isinstance(action, ScaleOut) for action in actions):
        view = _beside_other_stage(view, fleet, now)
    plan = plan_capacity(view.capacity, actions, now)
    new_ids = [_new_id(view.pattern_of(step)) for step in plan.steps if isinstance(step, StartNew)]
    decision = decision_record(
        actor=SCALER,
        kind=decided.kind,
        subject_type="scaling_policy",
        subject=decided.subject,
        reason=decided.reason,
        inputs=dict(decided.figures),
        outcome={**plan.outcome(new_ids), **_weight_sources(view, plan, fleet)},
        rejected=dict(decided.rejected),
        idempotency_key=f"scaler:{view.policy.pk}:{decided.figures['tick']}",
    )
    if not decision.is_new:
        return None
    _carry_out(view, plan, new_ids, decision)
    return decision


def _weight_sources(view: StageView, plan: CapacityPlan, fleet: Sequence[FleetMessage]) -> dict[str, Any]:
    """`warm`: by warm spare, the likely source of its weights. The source is chosen again when the load begins."""
    loading = {step.instance_id for step in plan.steps if isinstance(step, LoadWeights)}
    if not loading:
        return {}
    utilisation = {item["id"]: item["utilisation"] for message in fleet for item in message["instances"]}
    plans = {row.pk: weight_plan(row, utilisation) for row in view.pool if row.pk in loading}
    return {
        "warm": {
            name: {"source": plan.choices[0].id or plan.choices[0].kind, "reason": plan.reason}
            for name, plan in plans.items()
        }
    }


def _carry_out(view: StageView, plan: CapacityPlan, new_ids: Sequence[str], decision: Decision) -> None:
    ids = iter(new_ids)
    because = {"policy": decision.subject, "decision": decision.pk}
    for step in plan.steps:
        match step:
            case SwitchRole():
                _switch_role(view, step, plan)
            case WakeUp() | LoadWeights() | StartNew():
                _bring_up(view, step, ids, because)
            case Undrain():
                instance_undrain(actor=SCALER, instance_id=step.instance_id)
            case PutToSleep():
                sleep_order(actor=SCALER, instance_id=step.instance_id, level=step.sleep_level, scale_in=because)
            case Drain():
                instance_drain(actor=SCALER, instance_id=step.instance_id)


def _bring_up(view: StageView, step: Step, new_ids: Iterator[str], because: Mapping[str, Any]) -> None:
    """Wake it, load its weights or start it, and watch it until its first token."""
    scale_out = {**because, "warm": not isinstance(step, StartNew), "woken": isinstance(step, WakeUp)}
    pattern = view.pattern_of(step) if isinstance(step, StartNew) else view.pattern
    separately = loads_separately(pattern)
    if isinstance(step, StartNew):
        instance_id = next(new_ids)
        instance_create(actor=SCALER, id=instance_id, model=view.policy.model, **like(pattern, warm=separately))
    else:
        instance_id = step.instance_id
    if isinstance(step, WakeUp):
        wake_order(actor=SCALER, instance_id=instance_id, scale_out=scale_out)
    elif isinstance(step, LoadWeights) or separately:
        weights_load_order(actor=SCALER, instance_id=instance_id, scale_out=scale_out)
    first_served_watch(actor=SCALER, instance=Instance.objects.get(pk=instance_id), scale_out=scale_out)


def _switch_role(view: StageView, step: SwitchRole, plan: CapacityPlan) -> None:
    """Give the other stage's instance its new role, without a restart, and its scaler the memory that the plan says."""
    decided = plan.role_change
    if decided is None or plan.giving is None or view.giving is None:
        raise ValueError("a plan with a role switch must name the stage that gives the instance")
    decision_record(
        actor=SCALER,
        kind=decided.kind,
        subject_type="scaling_policy",
        subject=decided.subject,
        reason=decided.reason,
        inputs=dict(decided.figures),
        outcome={"instance": step.instance_id, "role": step.role},
    )
    role_order(actor=SCALER, instance_id=step.instance_id, role=step.role)
    # Not `scaler_state_save`: that would count as a tick of the other policy, which then skips its own.
    ScalerState.objects.filter(policy=view.giving).update(state=plan.giving.to_json())


# ---- the warm pool --------------------------------------------------------------------------------------------------


def _refill_pool(view: StageView, tick: int) -> Decision | None:
    """Start or stop warm spares until the policy has as many as it keeps; at a tick that decided nothing else."""
    target = pool_target(view)
    spares = [spare_of(row) for row in view.pool]
    change = refill(spares, target, room=view.capacity.room, busy=view.loading)
    started = [_new_id(view.pattern) for _ in range(change.start)]
    if not started and not change.stop:
        return None
    decision = decision_record(
        actor=SCALER,
        kind="scale_warm",
        subject_type="scaling_policy",
        subject=f"{view.capacity.config.model}/{view.capacity.config.role}",
        reason="pool_below_target" if started else "pool_above_target",
        inputs={"warm": len(view.pool), "wanted": target},
        outcome={"started": started} if started else {"stopped": list(change.stop)},
        idempotency_key=f"warm:{view.policy.pk}:{tick}",
    )
    if not decision.is_new:
        return None
    for new_id in started:
        instance_create(actor=SCALER, id=new_id, model=view.policy.model, **like(view.pattern, warm=True))
    for instance_id in change.stop:
        instance_stop(actor=SCALER, instance_id=instance_id)
    return decision


def _new_id(pattern: Instance | None) -> str:
    return f"{pattern.backend if pattern else 'instance'}-{secrets.token_hex(3)}"
