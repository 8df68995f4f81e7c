"""One policy's instances as a tick of the scaler sees them: those that serve or will, the warm ones, the pattern."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet

from controller.core.messages import FleetMessage
from controller.core.process_spec import SAYABLE
from controller.models import Instance, ScalingPolicy
from controller.models.fleet import Weights
from controller.scale import ScalingConfig
from controller.scale.load import FleetObservation
from controller.scale.observation import Row, observe
from controller.scale.warm import WarmInstance, share, wanted
from controller.selectors.topology import room_for, warm_on
from controller.services.actions import LOADABLE, Kind
from controller.services.role_switches import roles_ordered, takes_both
from controller.services.scaling_policies import scaling_config
from controller.services.sleeping import failed_lately, sleepable

STARTABLE = ("process",)  # provisioners that can make another instance
NO_DEVICE = "no_device"
NOT_COPIED = ("start_after", "weights")
COMING = (Weights.LOADING, Weights.WAKING)
SERVING = (Weights.PRESENT, *COMING)


class Stage(NamedTuple):
    """One policy's instances: those that serve or will, `pool` those that are warm, `asleep` those that sleep, and what
    another is made like, and `room`: how many more the free devices allow (None: nothing bounds them)."""

    policy: ScalingPolicy
    config: ScalingConfig
    pool: list[Instance]
    asleep: list[Instance]
    loading: bool
    pattern: Instance | None
    room: int | None
    seen: FleetObservation


def stage_of(policy: ScalingPolicy, fleet: Sequence[FleetMessage], now: float) -> Stage:
    turning = roles_ordered(policy.model)
    rows = list(Instance.objects.live().select_related("model", "host").filter(model=policy.model))
    rows = sorted((row for row in rows if turning.get(row.pk, row.role) == policy.role), key=lambda row: row.pk)
    wanted = [row for row in rows if row.desired_state == Instance.Desired.RUNNING]
    pool = [row for row in wanted if row.weights == Weights.ABSENT]
    serving = [row for row in rows if row.weights in SERVING]
    asleep = _sleepers(wanted)
    pattern = _pattern(policy, rows)
    room = room_for(pattern) if pattern is not None else None
    makeable = pattern is not None and room != 0
    startable = makeable or any(each.ready for each in map(warm_of, (*pool, *asleep)))
    able = sleepable(serving) - turning.keys() if policy.sleep_level else set()
    turns = _turning(serving)
    known = [
        Row(row.pk, row.desired_state, _state(row, turning), _fixed(row, able), row.pk in turns) for row in serving
    ]
    seen = observe(known, fleet, now, policy.model.name, startable=startable, role=policy.role)
    if pattern is not None and room == 0:
        seen = replace(seen, held_by=NO_DEVICE)
    loading = any(row.weights in COMING for row in serving)
    return Stage(policy, scaling_config(policy), pool, asleep, loading, pattern, room, seen)


def _turning(serving: Sequence[Instance]) -> set[str]:
    """Those that may take the other stage's role. The last of its kind stays: only engines of a kind read each other's
    KV, so it would leave those of the other stage alone, or be alone there."""
    kinds = Counter(row.backend for row in serving)
    able = [row for row in serving if takes_both(row) and kinds[row.backend] > 1]
    return {row.pk for row in able} - failed_lately(able, Kind.ROLE_SWITCH)


def startable_now(stage: Stage, wanted: int) -> int:
    """Of so many new instances those that there are a pattern and free devices for."""
    if stage.pattern is None:
        return 0
    return wanted if stage.room is None else min(wanted, stage.room)


def warm_wanted(stage: Stage) -> int:
    """What the policy says; else its part of the devices that are free or held by those that are warm."""
    if stage.policy.warm is not None:
        return stage.policy.warm
    used = len(stage.seen.having("ready")) + len(stage.seen.having("starting")) + len(stage.asleep)
    headroom = stage.config.max_instances - used
    if stage.pattern is None or stage.room is None:
        return wanted(len(stage.pool), room=None, share=0, headroom=headroom)
    sharers = _sharers(stage, stage.pattern)
    warm = warm_on(stage.pattern, sharers.values())
    pools = {policy: warm.pools[kind] for policy, kind in sharers.items()}
    mine = share(stage.policy.pk, pools, (warm.free + warm.devices) // stage.pattern.tp)
    elsewhere = len(stage.pool) - pools[stage.policy.pk]  # on other hosts: nobody shares these
    return wanted(len(stage.pool), room=stage.room, share=elsewhere + mine, headroom=headroom)


def _sharers(stage: Stage, pattern: Instance) -> dict[int, tuple[int, str]]:
    """Policies that would start their next instance on the pattern's devices, by id with model and role; this one among
    them, and whatever pool they keep: each is left its part."""
    policies = {each.pk: (each.model_id, each.role) for each in ScalingPolicy.objects.filter(enabled=True)}
    next_to = {(row.model_id, row.role): row for row in patterns() if not row.settings_refused}
    found = {id: kind for id, kind in policies.items() if kind in next_to and _same_devices(next_to[kind], pattern)}
    return {**found, stage.policy.pk: (stage.policy.model_id, stage.policy.role)}


def _same_devices(one: Instance, other: Instance) -> bool:
    kinds = {one.device_kind, other.device_kind} - {""}  # without a kind any
    return one.host_id == other.host_id and len(kinds) <= 1


def patterns() -> QuerySet[Instance]:
    """What the next instance of each model and role is made like, as `_pattern` finds it for one."""
    gone = ExpressionWrapper(
        Q(desired_state=Instance.Desired.STOPPED, observed_state__in=Instance.GONE), BooleanField()
    )
    rows = Instance.objects.filter(provisioner__in=STARTABLE).annotate(gone=gone)
    return rows.order_by("model_id", "role", "gone", "-created_at").distinct("model_id", "role")


def _sleepers(wanted: Sequence[Instance]) -> list[Instance]:
    """Those that can be woken; one that did not wake up lately is left alone for a while."""
    asleep = [row for row in wanted if row.weights == Weights.ASLEEP]
    failed = failed_lately(asleep, Kind.WAKE, Kind.WEIGHTS_LOAD) if asleep else set()
    return [row for row in asleep if row.pk not in failed]


def _fixed(row: Instance, able: Collection[str]) -> bool:
    """Somebody else's endpoint cannot be started or stopped, but it may be one that is `able` to sleep."""
    return row.provisioner not in STARTABLE and row.pk not in able


def _state(row: Instance, turning: Mapping[str, str]) -> str:
    """An engine whose weights or whose role are on their way answers its provisioner, and is no capacity yet."""
    ready = row.observed_state == Instance.Observed.READY
    coming = row.weights in COMING or row.pk in turning
    return Instance.Observed.STARTING if ready and coming else row.observed_state


def warm_of(row: Instance) -> WarmInstance:
    ready = row.observed_state == Instance.Observed.READY and row.url != ""
    return WarmInstance(row.pk, ready, row.desired_at.timestamp(), row.provisioner not in STARTABLE)


def takeable(stage: Stage) -> list[WarmInstance]:
    """The warm and the sleeping, with how far their weights have to come."""
    give = any(member.state == "ready" for member in stage.seen.members)  # an engine that weights can be copied from
    found = []
    for row in (*stage.pool, *stage.asleep):
        copied = 1 if give and row.backend in LOADABLE else 2
        found.append(warm_of(row)._replace(source=0 if row.sleep_level == 1 else copied))
    return found


def _pattern(policy: ScalingPolicy, rows: Sequence[Instance]) -> Instance | None:
    """What another instance is made like: the newest of ours, if need be one that is gone. None where its settings were
    refused: another one would fail the same way, until somebody starts one with other settings."""
    ours = [row for row in rows if row.provisioner in STARTABLE]
    if ours:
        return max(ours, key=lambda row: row.created_at)
    past = Instance.objects.filter(model=policy.model, role=policy.role, provisioner__in=STARTABLE)
    newest = past.order_by("-created_at").first()
    return None if newest is None or newest.settings_refused else newest


def loads_apart(pattern: Instance | None) -> bool:
    """A new process of this kind comes up without weights and is told where to get them: from another engine's memory
    sooner than from the disk. Only real weights, or emulated ones whose times by source are given, differ by source."""
    if pattern is None or pattern.backend not in LOADABLE:
        return False
    return pattern.spec.get("executor") == "torch" or bool(pattern.spec.get("emulated_load_s"))


def like(pattern: Instance | None, *, warm: bool = False) -> dict[str, Any]:
    """Arguments of instance_wish for another instance of the same kind. Without a pattern the scaler does not ask."""
    if pattern is None:
        raise ValueError("no instance to take as the pattern")
    spec = {name: value for name, value in pattern.spec.items() if name in SAYABLE and name not in NOT_COPIED}
    return {
        **{name: getattr(pattern, name) for name in ("backend", "provisioner", "role", "host", "device_kind", "tp")},
        "max_num_seqs": pattern.max_num_seqs,
        "unit_cost": pattern.unit_cost,
        "spec": {**spec, "weights": Weights.ABSENT.value} if warm else spec,
    }
