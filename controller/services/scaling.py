"""One tick of the scaler for one policy: lock, look, decide, act and record in a single transaction.

A worker killed anywhere in it leaves nothing; a tick that was applied has moved the state's tick number, which is the
Decision's idempotency key, so none is applied twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from controller.core.decisions import Decision as Decided
from controller.core.messages import FleetMessage
from controller.models import Decision, Instance, ScalerState, ScalingPolicy, ScalingSample
from controller.scale import Drain, ScaleOut, Scaler, Undrain
from controller.scale import ScalerState as Memory
from controller.scale.load import FleetObservation
from controller.scale.roles import spare_since
from controller.scale.warm import fill, take
from controller.selectors.weights import weight_plan
from controller.services.actions import first_served_watch, weights_load_order
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.instances import instance_drain, instance_stop, instance_undrain, instance_wish
from controller.services.scaling_policies import scaler_lock, scaler_state_save
from controller.services.scaling_roles import Given, given, switch_role
from controller.services.scaling_stages import (
    Stage,
    like,
    loads_apart,
    stage_of,
    startable_now,
    takeable,
    warm_of,
    warm_wanted,
)
from controller.services.sleeping import sleep_order, sleepable, wake_order

SCALER = Actor.job("scaler")
EARLY_S = 0.25  # beat's jitter: a tick this much before its time counts
SAMPLE_S = 5.0  # between two points of the line that pages draw
SAMPLES_KEPT_DAYS = 7


def scaler_tick(*, policy_id: int, fleet: Sequence[FleetMessage], now: float) -> Decision | None:
    """`now` is epoch seconds. None: nothing worth a Decision, not due yet, or somebody else is at it."""
    with transaction.atomic():
        if not scaler_lock(policy_id):
            return None
        policy = ScalingPolicy.objects.select_related("model").filter(pk=policy_id, enabled=True).first()
        if policy is None or not _due(policy):
            return None
        stage = _with_switches(stage_of(policy, fleet, now), fleet, now)
        row = ScalerState.objects.filter(policy=policy).first()
        before = row.state if row else {}
        memory, actions, decided = Scaler().decide(stage.config, Memory.from_json(before), stage.seen, now)
        spare = spare_since(before.get("spare_since"), stage.config, stage.seen, now)
        scaler_state_save(policy=policy, state={**memory.to_json(), "spare_since": spare})
        if decided or memory.ticks % _ticks_a_sample(policy) == 0:
            _sample(policy, memory, stage.seen, now)
        if decided:
            return _apply(stage, actions, decided, fleet, now)
        return _keep_warm(stage, memory.ticks)


def _with_switches(stage: Stage, fleet: Sequence[FleetMessage], now: float) -> Stage:
    """Where nothing can be started the other stage may still give one of its instances."""
    if stage.seen.startable or given(stage, fleet, now) is None:
        return stage
    return stage._replace(seen=replace(stage.seen, startable=True))


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


def _due(policy: ScalingPolicy) -> bool:
    last = ScalerState.objects.filter(policy=policy).values_list("updated_at", flat=True).first()
    return last is None or timezone.now() - last >= timedelta(seconds=policy.interval_s - EARLY_S)


# ---- acting ---------------------------------------------------------------------------------------------------------


def _apply(
    stage: Stage, actions: Sequence[Any], decided: Decided, fleet: Sequence[FleetMessage], now: float
) -> Decision | None:
    """More instances come from the other stage, then from the warm pool and those that sleep, then from nothing, in the
    order of speed."""
    wanted = sum(action.instances for action in actions if isinstance(action, ScaleOut))
    switched = given(stage, fleet, now) if wanted else None
    taken = take(takeable(stage), wanted - (switched is not None))
    new = startable_now(stage, wanted - (switched is not None) - len(taken))
    started = [_new_id(stage.pattern) for _ in range(new)]
    to_sleep = _to_sleep(stage, actions)
    decision = decision_record(
        actor=SCALER,
        kind=decided.kind,
        subject_type="scaling_policy",
        subject=decided.subject,
        reason=decided.reason,
        inputs=dict(decided.figures),
        outcome=_outcome(stage, switched, taken, started, fleet) | ({"asleep": to_sleep} if to_sleep else {}),
        rejected=dict(decided.rejected),
        idempotency_key=f"scaler:{stage.policy.pk}:{decided.figures['tick']}",
    )
    if not decision.is_new:
        return None
    if switched is not None:
        switch_role(switched, actor=SCALER)
    _start(stage, taken, started, decision)
    for action in actions:
        if isinstance(action, Undrain):
            instance_undrain(actor=SCALER, instance_id=action.instance_id)
        elif isinstance(action, Drain) and action.instance_id in to_sleep:
            scale_in = {"policy": decided.subject, "decision": decision.pk}
            level = stage.policy.sleep_level
            sleep_order(actor=SCALER, instance_id=action.instance_id, level=level, scale_in=scale_in)
        elif isinstance(action, Drain):
            instance_drain(actor=SCALER, instance_id=action.instance_id)
    return decision


def _to_sleep(stage: Stage, actions: Sequence[Any]) -> list[str]:
    """Of those that go, the ones that sleep instead of being stopped."""
    if not stage.policy.sleep_level:
        return []
    go = [action.instance_id for action in actions if isinstance(action, Drain)]
    able = sleepable(Instance.objects.filter(pk__in=go))
    return [name for name in go if name in able]


def _start(stage: Stage, taken: Sequence[str], started: Sequence[str], decision: Decision) -> None:
    """Wake, load, or wish for; each is watched until its first token."""
    sleepers, apart = {row.pk for row in stage.asleep}, loads_apart(stage.pattern)
    for new_id in started:
        instance_wish(actor=SCALER, id=new_id, model=stage.policy.model, **like(stage.pattern, warm=apart))
    for instance_id in (*taken, *started):
        scale_out = {"policy": decision.subject, "decision": decision.pk}
        scale_out |= {"warm": instance_id in taken, "woken": instance_id in sleepers}
        if instance_id in sleepers:
            wake_order(actor=SCALER, instance_id=instance_id, scale_out=scale_out)
        elif instance_id in taken or apart:
            weights_load_order(actor=SCALER, instance_id=instance_id, scale_out=scale_out)
        first_served_watch(actor=SCALER, instance=Instance.objects.get(pk=instance_id), scale_out=scale_out)


def _outcome(
    stage: Stage,
    switched: Given | None,
    taken: Sequence[str],
    started: Sequence[str],
    fleet: Sequence[FleetMessage],
) -> dict[str, Any]:
    """`started` all that will serve more; `warm` those of them that only need weights, and from where they likely come
    (chosen anew when the engine is told); `woken` those that slept, and how deeply."""
    outcome: dict[str, Any] = {}
    if taken or started:
        outcome["started"] = [*taken, *started]
    warm = [row for row in stage.pool if row.pk in taken]
    if warm:
        utilisation = {item["id"]: item["utilisation"] for message in fleet for item in message["instances"]}
        plans = {row.pk: weight_plan(row, utilisation) for row in warm}
        outcome["warm"] = {
            name: {"source": plan.choices[0].id or plan.choices[0].kind, "reason": plan.reason}
            for name, plan in plans.items()
        }
    woken = {row.pk: {"level": row.sleep_level} for row in stage.asleep if row.pk in taken}
    if woken:
        outcome["woken"] = woken
    if switched is not None:
        outcome["switched"] = {"instance": switched.action.instance_id, "from": switched.giving.role}
    return outcome


def _keep_warm(stage: Stage, tick: int) -> Decision | None:
    """As many warm instances as the policy says, else as its free devices allow."""
    target = warm_wanted(stage)
    pool = [warm_of(row) for row in stage.pool]
    change = fill(pool, target, startable=stage.pattern is not None, busy=stage.loading)
    started = [_new_id(stage.pattern) for _ in range(startable_now(stage, change.start))]
    if not started and not change.stop:
        return None
    decision = decision_record(
        actor=SCALER,
        kind="scale_warm",
        subject_type="scaling_policy",
        subject=f"{stage.config.model}/{stage.config.role}",
        reason="pool_below_target" if started else "pool_above_target",
        inputs={"warm": len(stage.pool), "wanted": target},
        outcome={"started": started} if started else {"stopped": list(change.stop)},
        idempotency_key=f"warm:{stage.policy.pk}:{tick}",
    )
    if not decision.is_new:
        return None
    for new_id in started:
        instance_wish(actor=SCALER, id=new_id, model=stage.policy.model, **like(stage.pattern, warm=True))
    for instance_id in change.stop:
        instance_stop(actor=SCALER, instance_id=instance_id)
    return decision


def _new_id(pattern: Instance | None) -> str:
    return f"{pattern.backend if pattern else 'instance'}-{secrets.token_hex(3)}"
