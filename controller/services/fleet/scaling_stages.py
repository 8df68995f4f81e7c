"""The stage of a scaling policy for one tick of the scaler: instances, warm spares, sleepers, and the pattern of new
instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from controller.core.messages import FleetMessage
from controller.engine.process_spec import SAYABLE
from controller.models import Decision, Instance, ScalerState, ScalingPolicy
from controller.models.fleet import Role, Weights
from controller.scale import ScalerMemory
from controller.scale.capacity_plan import NOTHING_TO_START, TEMPLATE_PAUSED, OtherStage, StageCapacity, StartNew
from controller.scale.load import FleetObservation
from controller.scale.observation import InstanceRow, fresh, observe, wanted_by_requests
from controller.scale.warm_pool import Spare, share, target_size, weight_source
from controller.selectors.fleet.scaling import cold_start_s, patterns
from controller.selectors.fleet.topology import room_for, warm_on
from controller.services.actors import RECONCILER, SCALER
from controller.services.fleet.actions import LOADABLE, Kind
from controller.services.fleet.instances import FROM_TEMPLATE
from controller.services.fleet.role_switches import roles_ordered, takes_both
from controller.services.fleet.scaling_policies import scaler_lock, scaling_config
from controller.services.fleet.sleeping import failed_lately, sleepable

NOT_COPIED = ("start_after", "weights")
COMING = (Weights.LOADING, Weights.WAKING)
SERVING = (Weights.PRESENT, *COMING)
ENDED = ("instance_drained", "instance_stopped")
OTHER_STAGE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class StageView(NamedTuple):
    """One policy, its stage as the capacity plan sees it, and the rows behind that.

    `pool`: its warm spares; `sleepers`: instances that can be woken; `loading`: whether an instance loads weights or
    wakes up; `pattern`: the instance whose settings a new one gets; `giving`: the policy of the other stage, if that
    was considered; `gone`: the stopped instances like which one may be started.
    """

    policy: ScalingPolicy
    capacity: StageCapacity
    pool: list[Instance]
    sleepers: list[Instance]
    loading: bool
    pattern: Instance | None
    giving: ScalingPolicy | None = None
    gone: tuple[Instance, ...] = ()

    def pattern_of(self, step: StartNew) -> Instance | None:
        """The instance whose settings this new one gets."""
        return next((row for row in self.gone if row.pk == step.like), self.pattern)

    @property
    def seen(self) -> FleetObservation:
        return self.capacity.seen


def stage_of(policy: ScalingPolicy, fleet: Sequence[FleetMessage], now: float) -> StageView:
    """The stage alone. `with_other_stage` adds the instances that the other stage could give. `now`: epoch seconds."""
    switching = roles_ordered(policy.model)
    rows = list(Instance.objects.live().select_related("model", "host", "template").filter(model=policy.model))
    rows = sorted((row for row in rows if switching.get(row.pk, row.role) == policy.role), key=lambda row: row.pk)
    wanted = [row for row in rows if row.desired_state == Instance.Desired.RUNNING]
    pool = [row for row in wanted if row.weights == Weights.ABSENT]
    serving = [row for row in rows if row.weights in SERVING]
    sleepers = _sleepers(wanted)
    pattern = _pattern(policy, rows)
    paused = pattern is not None and pattern.template is not None and pattern.template.paused_at is not None
    pattern = None if paused else pattern
    room = room_for(pattern) if pattern is not None else 0
    able = sleepable(serving, policy.sleep_level) - switching.keys() if policy.sleep_level else set()
    both = _taking_both_roles(serving)
    known = [
        InstanceRow(row.pk, row.desired_state, _state(row, switching), _fixed(row, able), row.pk in both)
        for row in serving
    ]
    seen = observe(known, fleet, now, policy.model.name, role=policy.role)
    engine_ready = bool(seen.having("ready"))
    needed = wanted_by_requests(fresh(fleet, now))
    spares = tuple(spare_of(row, engine_ready=engine_ready, needed=row.pk in needed) for row in (*pool, *sleepers))
    gone = _needed_stopped(policy, needed, serving)
    capacity = StageCapacity(
        config=scaling_config(policy),
        seen=seen,
        spares=spares,
        pattern=pattern is not None,
        without_pattern=TEMPLATE_PAUSED if paused else NOTHING_TO_START,
        room=room,
        sleepable=frozenset(able),
        sleep_level=policy.sleep_level,
        start_s=None if pattern is None else cold_start_s(pattern),
        gone=tuple(row.pk for row in gone),
    )
    loading = any(row.weights in COMING for row in serving)
    return StageView(policy, capacity, pool, sleepers, loading, pattern, gone=gone)


def with_other_stage(view: StageView, fleet: Sequence[FleetMessage], now: float) -> StageView:
    """The stage with the other one of prefill and decode. The other stage stays unknown if it has no enabled policy, or
    if another worker is ticking that policy, which this call locks until the transaction ends."""
    role = OTHER_STAGE.get(Role(view.policy.role))
    policies = ScalingPolicy.objects.select_related("model").filter(model=view.policy.model, role=role, enabled=True)
    giving = policies.first() if role else None
    if giving is None or not scaler_lock(giving.pk):
        return view
    row = ScalerState.objects.filter(policy=giving).first()
    theirs = stage_of(giving, fleet, now).capacity
    other = OtherStage(theirs.config, theirs.seen, ScalerMemory.from_json(row.state if row else {}))
    return view._replace(capacity=replace(view.capacity, other=other), giving=giving)


def pool_target(view: StageView) -> int:
    """The desired number of warm spares: the policy's own, else its share of the devices that are free or held by warm
    spares."""
    if view.pattern is not None and view.pattern.template_id is not None:
        return 0  # an engine that is started from a template brings its weights along
    if view.policy.warm is not None:
        return view.policy.warm
    seen = view.seen
    used = len(seen.having("ready")) + len(seen.having("starting")) + len(view.sleepers)
    headroom = view.capacity.config.max_instances - used
    room = view.capacity.room
    if view.pattern is None or room is None:
        return target_size(len(view.pool), room=None, share=0, headroom=headroom)
    sharers = _sharers(view, view.pattern)
    warm = warm_on(view.pattern, sharers.values())
    pools = {policy: warm.pools[kind] for policy, kind in sharers.items()}
    mine = share(view.policy.pk, pools, (warm.free + warm.devices) // view.pattern.tp)
    elsewhere = len(view.pool) - pools[view.policy.pk]  # on other hosts, which are not shared
    return target_size(len(view.pool), room=room, share=elsewhere + mine, headroom=headroom)


def _sharers(view: StageView, pattern: Instance) -> dict[int, tuple[int, str]]:
    """Policies that would start their next instance on the pattern's devices, this one included: model and role by id.
    Each has its share, whatever pool it keeps."""
    policies = {each.pk: (each.model_id, each.role) for each in ScalingPolicy.objects.filter(enabled=True)}
    next_to = {(row.model_id, row.role): row for row in patterns() if not row.settings_refused}
    found = {id: kind for id, kind in policies.items() if kind in next_to and _same_devices(next_to[kind], pattern)}
    return {**found, view.policy.pk: (view.policy.model_id, view.policy.role)}


def _same_devices(one: Instance, other: Instance) -> bool:
    kinds = {one.device_kind, other.device_kind} - {""}  # "" matches any kind
    return one.host_id == other.host_id and len(kinds) <= 1


def spare_of(row: Instance, *, engine_ready: bool = False, needed: bool = False) -> Spare:
    """A warm spare or a sleeper for the capacity plan. `engine_ready`: whether an engine of its stage could send its
    weights. `needed`: whether recent requests need it."""
    ready = row.observed_state == Instance.Observed.READY and row.url != ""
    level = row.sleep_level if row.weights == Weights.ASLEEP else 0
    source = weight_source(sleep_level=level, copies=row.backend in LOADABLE, engine_ready=engine_ready)
    return Spare(row.pk, ready, row.desired_at.timestamp(), not row.abilities.starts, source, level, needed)


def _sleepers(wanted: Sequence[Instance]) -> list[Instance]:
    """The sleeping instances, without those whose last wake-up failed a short while ago."""
    asleep = [row for row in wanted if row.weights == Weights.ASLEEP]
    failed = failed_lately(asleep, Kind.WAKE, Kind.WEIGHTS_LOAD) if asleep else set()
    return [row for row in asleep if row.pk not in failed]


def _needed_stopped(
    policy: ScalingPolicy, needed: Collection[str], serving: Sequence[Instance]
) -> tuple[Instance, ...]:
    """Instances of the stage that the scaler stopped, that recent requests need, and like which one could be started
    now; the last that was stopped first. One that a person stopped stays away. Where one with the same settings serves
    or starts, another would be no faster. One query, and three more for each that is needed and stopped."""
    if not needed:
        return ()
    stopped = Instance.objects.filter(pk__in=needed, desired_state=Instance.Desired.STOPPED)
    rows = stopped.filter(model=policy.model, role=policy.role).select_related("model", "host", "template")
    there = [like(each) for each in serving]
    return tuple(row for row in rows.order_by("-desired_at", "pk") if like(row) not in there and _may_return(row))


def _may_return(row: Instance) -> bool:
    paused = row.template is not None and row.template.paused_at is not None
    if paused or not row.abilities.starts or row.settings_refused:
        return False
    ended = Decision.objects.filter(subject_type="instance", subject=row.pk, kind__in=ENDED)
    last = ended.exclude(actor=RECONCILER.name, actor_type=RECONCILER.type).order_by("-at", "-id").first()
    by_scaler = last is not None and (last.actor, last.actor_type) == (SCALER.name, SCALER.type)
    return by_scaler and room_for(row) != 0


def _taking_both_roles(serving: Sequence[Instance]) -> set[str]:
    """Ids of instances that may take the other stage's role. The last one of its backend stays in this stage: KV moves
    only between engines of one backend, so either stage would lack a peer."""
    backends = Counter(row.backend for row in serving)
    able = [row for row in serving if takes_both(row) and backends[row.backend] > 1]
    return {row.pk for row in able} - failed_lately(able, Kind.ROLE_SWITCH)


def _fixed(row: Instance, able: Collection[str]) -> bool:
    """Whether the scaler must not scale it in: a registered endpoint cannot be stopped by us, but may be `able` to
    sleep."""
    return not row.abilities.starts and row.pk not in able


def _state(row: Instance, switching: Mapping[str, str]) -> str:
    """The state for the scaler. An engine that loads weights or switches its role is observed ready, but counts as
    starting."""
    ready = row.observed_state == Instance.Observed.READY
    coming = row.weights in COMING or row.pk in switching
    return Instance.Observed.STARTING if ready and coming else row.observed_state


def _pattern(policy: ScalingPolicy, rows: Sequence[Instance]) -> Instance | None:
    """The instance whose settings a new one gets: the newest one that we started, even if it is gone. None if its
    engine refused its settings, since another one would fail in the same way until a person starts one with other
    settings. One that was only tried (`TRIED`) counts if there is no other."""
    ours = [row for row in rows if row.abilities.starts and not _only_tried(row)]
    if ours:
        return max(ours, key=lambda row: row.created_at)
    newest = patterns().filter(model=policy.model, role=policy.role).select_related("template").first()
    return None if newest is None or (newest.settings_refused and not _only_tried(newest)) else newest


def _only_tried(row: Instance) -> bool:
    """TRIED of a row that is in memory."""
    return row.ready_at is None and row.template is not None and row.template.paused_at is not None


def loads_separately(pattern: Instance | None) -> bool:
    """Whether a new process of this kind starts without weights and then loads them from the nearest source. That makes
    a difference only for real weights, and for emulated ones with a load time for each source."""
    if pattern is None or pattern.backend not in LOADABLE:
        return False
    return pattern.spec.get("executor") == "torch" or bool(pattern.spec.get("emulated_load_s"))


def like(pattern: Instance | None, *, warm: bool = False) -> dict[str, Any]:
    """Arguments of `instance_create` for another instance of the same kind. Raises ValueError without a pattern."""
    if pattern is None:
        raise ValueError("there is no instance to use as a pattern")
    said = FROM_TEMPLATE if pattern.template_id is not None else SAYABLE
    spec = {name: value for name, value in pattern.spec.items() if name in said and name not in NOT_COPIED}
    warm = warm and pattern.template_id is None
    copied = ("backend", "provisioner", "template", "role", "host", "device_kind", "tp")
    return {
        **{name: getattr(pattern, name) for name in copied},
        "max_num_seqs": pattern.max_num_seqs,
        "unit_cost": pattern.unit_cost,
        "spec": {**spec, "weights": Weights.ABSENT.value} if warm else spec,
    }
