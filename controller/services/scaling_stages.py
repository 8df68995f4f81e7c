"""One policy's instances as a tick of the scaler sees them: those that serve or will, the warm ones, the pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from controller.core.messages import FleetMessage
from controller.models import Instance, ScalingPolicy
from controller.models.fleet import Weights
from controller.scale import ScalingConfig
from controller.scale.load import FleetObservation
from controller.scale.observation import Row, observe
from controller.scale.warm import WarmInstance
from controller.services.scaling_policies import scaling_config

STARTABLE = ("process",)  # provisioners that can make another instance
NOT_COPIED = ("start_after", "weights")


class Stage(NamedTuple):
    """One policy's instances: those that serve or will, `pool` those that are warm, and what another is made like."""

    policy: ScalingPolicy
    config: ScalingConfig
    pool: list[Instance]
    loading: bool
    pattern: Instance | None
    seen: FleetObservation


def stage_of(policy: ScalingPolicy, fleet: Sequence[FleetMessage], now: float) -> Stage:
    rows = list(Instance.objects.live().select_related("model", "host").filter(model=policy.model, role=policy.role))
    rows.sort(key=lambda row: row.pk)
    pool = [row for row in rows if row.weights == Weights.ABSENT and row.desired_state == Instance.Desired.RUNNING]
    serving = [row for row in rows if row.weights != Weights.ABSENT]
    pattern = _pattern(policy, rows)
    startable = pattern is not None or any(each.ready for each in map(warm_of, pool))
    known = [Row(row.pk, row.desired_state, _state(row), row.provisioner not in STARTABLE) for row in serving]
    seen = observe(known, fleet, now, policy.model.name, startable=startable, role=policy.role)
    loading = any(row.weights == Weights.LOADING for row in serving)
    return Stage(policy, scaling_config(policy), pool, loading, pattern, seen)


def _state(row: Instance) -> str:
    """An engine whose weights are on their way answers its provisioner, and is no capacity yet."""
    ready = row.observed_state == Instance.Observed.READY
    return Instance.Observed.STARTING if ready and row.weights == Weights.LOADING else row.observed_state


def warm_of(row: Instance) -> WarmInstance:
    ready = row.observed_state == Instance.Observed.READY and row.url != ""
    return WarmInstance(row.pk, ready, row.desired_at.timestamp(), row.provisioner not in STARTABLE)


def _pattern(policy: ScalingPolicy, rows: Sequence[Instance]) -> Instance | None:
    """What another instance is made like: the newest of ours, if need be one that is gone."""
    ours = [row for row in rows if row.provisioner in STARTABLE]
    if ours:
        return max(ours, key=lambda row: row.created_at)
    past = Instance.objects.filter(model=policy.model, role=policy.role, provisioner__in=STARTABLE)
    return past.order_by("-created_at").first()


def like(pattern: Instance | None, *, warm: bool = False) -> dict[str, Any]:
    """Arguments of instance_wish for another instance of the same kind. Without a pattern the scaler does not ask."""
    if pattern is None:
        raise ValueError("no instance to take as the pattern")
    spec = {name: value for name, value in pattern.spec.items() if name not in NOT_COPIED}
    return {
        **{name: getattr(pattern, name) for name in ("backend", "provisioner", "role", "host", "device_kind", "tp")},
        "max_num_seqs": pattern.max_num_seqs,
        "unit_cost": pattern.unit_cost,
        "spec": {**spec, "weights": Weights.ABSENT.value} if warm else spec,
    }
