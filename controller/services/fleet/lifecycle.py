"""Records what the reconciler saw and decided about instances: one Decision for each transition.

An instance that failed is replaced by one with the same settings. If the engine refuses the settings it refuses them
again, and without a limit there would be a new row each minute, so the reconciler gives up after a number of tries.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Max
from django.db.models.functions import Now
from django.utils import timezone

from controller.engine import placement
from controller.engine.process_spec import SAYABLE, start_after, start_refused, values_refused
from controller.engine.runtime_env import RUNTIME_ENV
from controller.models import Action, Decision, Instance, InstanceInterval, LaunchTemplate, ScalingPolicy
from controller.models.fleet import Weights
from controller.postgres.clock import ahead_of_host
from controller.scale.capacity_plan import NO_DEVICE
from controller.scale.lifecycle import (
    START_TIMEOUT_S,
    FoundAwake,
    Mark,
    Replace,
    StopWanted,
    Wanted,
    pause_before_start,
)
from controller.scale.observation import NO_CAPACITY
from controller.selectors.fleet.topology import free_among, usable_devices
from controller.services.actors import RECONCILER
from controller.services.config import config_version_raise
from controller.services.decisions import decision_record
from controller.services.fleet.actions import Kind, sleep_ended, weights_lost
from controller.services.fleet.instances import instance_create, instance_observe, instance_stop
from controller.services.fleet.launch_templates import devices_of, launch_of, launch_template_pause
from controller.services.fleet.scaling_stages import SERVING, like

FIRST_TIME = {("starting", "starting"), ("ready", "healthy")}  # state and reason of one that was not ready yet
AGAIN = "again"
FAILURES_WINDOW = timedelta(minutes=5)
REFUSED_TRIES = 3  # more than one, since an engine also refuses a folder that is just being mounted
TEMPLATE_TRIES = 3  # then its template is paused, for all instances that would be started from it
START_TRIES = 8  # with their pauses at least two minutes
BESIDE = timedelta(seconds=30)  # a replacement and its decision are stored in one transaction
SAME_STEP_S = 1.0  # a step's time that differs by no more is the stored one
AT_MAX = "at_max"  # why it is not replaced: its policy's maximum is reached without it
KINDS = {
    "pending": "instance_pending",
    "starting": "instance_started",
    "ready": "instance_ready",
    "draining": "instance_draining",
    "unreachable": "instance_unreachable",
    "unhealthy": "instance_unhealthy",
    "lost": "instance_lost",
    "stopped": "instance_gone",
}


def wanted_instances(outstanding: Mapping[str, int] | None) -> dict[str, list[Wanted]]:
    """Every live instance, by its source (`Instance.source`). `outstanding`: requests by instance, those counted whose
    KV it keeps, 0 for an instance that is missing; None: no gateway reports."""
    runs = dict(
        InstanceInterval.objects.filter(ended_at__isnull=True).values_list("instance_id", "started_at")
    )  # the run that the row knows of began no later than its open interval
    found: dict[str, list[Wanted]] = {}
    for row in Instance.objects.live().select_related("template"):
        found.setdefault(row.source, []).append(_wanted(row, runs.get(row.pk), outstanding))
    return found


def instance_mark(*, step: Mark) -> list[Decision]:
    """Store the state that was seen. Empty if it was stored already (compared under the row's lock)."""
    at = timezone.now()
    with transaction.atomic():
        row = Instance.objects.select_for_update().get(pk=step.id)
        again = step.again and _close_former_run(row, step)
        waits_for = step.state == Instance.Observed.PENDING and row.error != step.error
        if row.observed_state == step.state and row.url == (step.url or row.url) and not again and not waits_for:
            return []
        inputs: dict[str, Any] = {"was": row.observed_state, "url": step.url, "error": step.error}
        reason = AGAIN if row.ready_at is not None and (step.state, step.reason) in FIRST_TIME else step.reason
        if reason != AGAIN:  # when it was requested says nothing of a start that came hours later
            inputs["since_desired_s"] = round((at - row.desired_at).total_seconds(), 2)
        instance_observe(
            instance_id=row.pk,
            observed_state=step.state,
            url=step.url or None,
            generation=row.generation,
            error=step.error,
            at=at,
            new_run=again,
        )
        woke = weights_lost(actor=RECONCILER, row=row) if again else None
        seen = decision_record(
            actor=RECONCILER,
            kind=KINDS[step.state],
            subject_type="instance",
            subject=row.pk,
            reason=reason,
            inputs=inputs,
        )
    return [seen] if woke is None else [seen, woke]


def instance_found_awake(*, step: FoundAwake) -> Decision | None:
    """A registered endpoint reports that it is awake: its owner woke or restarted it. None if that is not
    enough to send requests there.

    An engine woken from a sleep without a copy of the weights may be awake without weights, since only our own wake-up
    reads them again; so may an SGLang, which reports ready although its memory was released. These are believed only if
    they were unreachable since they fell asleep: then it is a new process with whole weights.
    """
    with transaction.atomic():
        row = Instance.objects.select_for_update().get(pk=step.id)
        if row.weights != Weights.ASLEEP or row.version != step.version:
            return None  # the observation is older than the row
        whole = row.backend == "reference" or (row.backend == "vllm" and row.sleep_level == 1)
        if not whole and not _away_since_asleep(row):
            return None
        return sleep_ended(actor=RECONCILER, row=row, weights=Weights.PRESENT, reason="found_awake")


def _away_since_asleep(row: Instance) -> bool:
    """Whether it became ready after the end of the last order during which it slept."""
    orders = Action.objects.filter(instance=row, kind__in=(Kind.SLEEP, Kind.WAKE, Kind.WEIGHTS_LOAD))
    asleep_at = orders.aggregate(at=Max("ended_at"))["at"]
    return asleep_at is not None and row.ready_at is not None and row.ready_at > asleep_at


def instance_replace(*, step: Replace) -> Decision | None:
    """The instance has failed for good. Create another of its kind, after a longer pause the more have failed lately,
    unless that would fail as well."""
    with transaction.atomic():
        rows = Instance.objects.select_for_update(of=("self",)).select_related("model", "host", "template")
        row = rows.get(pk=step.id)
        failures = _recent_failures(row) + 1
        pause, never_ready = pause_before_start(failures), _never_ready_in_a_row(row)
        new_id = f"{row.backend}-{secrets.token_hex(3)}"
        inputs = {"error": step.error, "failures_5min": failures, "was": row.observed_state, "never_ready": never_ready}
        if (end := _given_up(row, step, never_ready)) is not None:
            _pause_template(row, end, never_ready, step.error)
            return _give_up(row, end, inputs)
        inputs["pause_s"] = pause
        blocked = NO_DEVICE if _without_device(row) else AT_MAX if _place_is_filled(row) else ""
        outcome = {"held": blocked} if blocked else {"replacement": new_id}
        decision = _decide(row, "instance_replaced", step.reason, "replaced", inputs, outcome)
        if decision is None:
            return None
        instance_observe(instance_id=row.pk, observed_state=Instance.Observed.FAILED, error=step.error)
        instance_stop(actor=RECONCILER, instance_id=row.pk)
        if blocked:
            return decision
        # A sleeper serves no requests, so its replacement must not undo the scale-in that put it to sleep.
        pattern = like(row, warm=row.weights in (Weights.ABSENT, Weights.ASLEEP, Weights.LEAVING))
        if pause:
            pattern["spec"]["start_after"] = (timezone.now() + timedelta(seconds=pause)).timestamp()
        instance_create(actor=RECONCILER, id=new_id, model=row.model, **pattern)
    return decision


class GivenUp(NamedTuple):
    """Why no replacement is started. `error`: stored on its row."""

    reason: str
    error: str


def _never_ready_in_a_row(row: Instance) -> int:
    """How many instances in a row, each the replacement of the one before, failed before they were ready, with this
    one."""
    if row.ready_at is not None:
        return 0
    around = (row.created_at - BESIDE, row.created_at + BESIDE)
    made = Decision.objects.filter(kind="instance_replaced", at__range=around, outcome__replacement=row.pk).first()
    return 1 + (made.inputs.get("never_ready", 0) if made is not None else 0)


def _given_up(row: Instance, step: Replace, never_ready: int) -> GivenUp | None:
    """None: a replacement is started."""
    told = {name: value for name, value in row.spec.items() if name in SAYABLE and name != "start_after"}
    if row.template is not None:
        return _given_up_of_template(row.template, step, never_ready)
    own = row.abilities.starts and row.backend == "reference"
    if own and (wrong := values_refused(told, timezone.now().timestamp(), row.max_num_seqs, row.ranks)):
        name, why = next(iter(wrong.items()))
        return GivenUp("settings_refused", f"{Instance.SETTINGS_REFUSED}: spec.{name} {why}")
    if step.refused and never_ready >= REFUSED_TRIES:
        return GivenUp("settings_refused", f"{Instance.SETTINGS_REFUSED} by the engine: {step.refused}")
    if never_ready >= START_TRIES:
        return GivenUp("never_ready", f"given up: {never_ready} in a row never became ready, the last: {step.error}")
    return None


def _give_up(row: Instance, end: GivenUp, inputs: Mapping[str, Any]) -> Decision | None:
    decision = _decide(row, "instance_given_up", end.reason, "given_up", inputs)
    if decision is not None:
        instance_observe(instance_id=row.pk, observed_state=Instance.Observed.FAILED, error=end.error)
        instance_stop(actor=RECONCILER, instance_id=row.pk)
    return decision


def _given_up_of_template(template: LaunchTemplate, step: Replace, never_ready: int) -> GivenUp | None:
    """One that served is replaced, unless nothing may be started from its template."""
    if template.paused_at is not None:
        return GivenUp("template_paused", f"not replaced, since its template {template} is paused: {step.error}")
    if never_ready < TEMPLATE_TRIES:
        return None
    told = f"given up, and its template {template} is paused: {never_ready} in a row never became ready, the last: "
    return GivenUp("template_paused", told + step.error)


def _pause_template(row: Instance, end: GivenUp, never_ready: int, error: str) -> None:
    """Other models and templates go on: only what would be started from this template waits for a person."""
    if row.template is not None and end.reason == "template_paused":
        launch_template_pause(actor=RECONCILER, row=row.template, instance=row.pk, failures=never_ready, error=error)


def _without_device(row: Instance) -> bool:
    """Whether too few devices are free for another one like it, its own included, which are free once it has failed."""
    usable = list(usable_devices(row.host, row.device_kind)) if row.host else []
    own = row.holdings.filter(released_at__isnull=True, device__in=usable).count()
    return bool(usable) and len(free_among(usable)) + own < row.tp


def _place_is_filled(row: Instance) -> bool:
    """Whether the scaler runs as many without it as its policy allows. It does not count an instance that gets no
    requests, so while the engine of a lost one came to its end, another may have been started."""
    if row.observed_state not in NO_CAPACITY or row.weights not in SERVING:
        return False
    policy = ScalingPolicy.objects.filter(model=row.model, role=row.role, enabled=True).first()
    others = Instance.objects.live().filter(model=row.model, role=row.role, weights__in=SERVING)
    others = others.filter(desired_state=Instance.Desired.RUNNING).exclude(observed_state__in=NO_CAPACITY)
    return policy is not None and others.count() >= policy.bounds(timezone.now())[1]


def instance_end_drain(*, step: StopWanted) -> Decision | None:
    """Stop an instance whose drain has ended, unless the drain was taken back meanwhile."""
    with transaction.atomic():
        row = Instance.objects.select_for_update().get(pk=step.id)
        if row.desired_state != Instance.Desired.DRAINING:
            return None
        inputs = {"drained_for_s": round((timezone.now() - row.desired_at).total_seconds(), 2)}
        decision = _decide(row, "instance_drained", step.reason, f"end_drain:{row.generation}", inputs)
        if decision is not None:
            instance_stop(actor=RECONCILER, instance_id=row.pk)
    return decision


def instances_seen(*, ids: Iterable[str]) -> int:
    """Store that they were seen just now, which a restart after an outage takes as the end of the former run."""
    return Instance.objects.filter(pk__in=list(ids)).update(observed_at=timezone.now())


def start_steps_seen(*, seen: Mapping[str, Mapping[str, float]]) -> None:
    """Store when engines reached the steps of their start, by instance. `seen`: in epoch seconds of this host's clock;
    stored in those of PostgreSQL's, since gateways may run on other hosts. What a launcher elsewhere tells as an age is
    a little earlier or later at each look; only what differs by more counts."""
    rows = Instance.objects.filter(pk__in=list(seen)).annotate(asked_at=Now())
    known = list(rows.values_list("pk", "start_steps", "asked_at"))
    ahead_s = ahead_of_host(known[0][2]) if known else 0.0
    for id, steps, _ in known:
        now = {name: at + ahead_s for name, at in seen[id].items()}
        same = steps.keys() == now.keys() and all(abs(now[name] - at) <= SAME_STEP_S for name, at in steps.items())
        if not same:
            Instance.objects.filter(pk=id).update(start_steps=now, updated_at=timezone.now())


def instance_start(*, instance_id: str) -> dict[str, Any]:
    """What its provisioner needs in order to start it.

    Its current role becomes its started role for good, since a provisioner may pass the same options to the engine at
    each later start, whatever role the instance has got meanwhile.
    """
    with transaction.atomic():
        rows = Instance.objects.select_for_update(of=("self",)).select_related("model", "template")
        row = rows.get(pk=instance_id)
        if not row.started_role:
            row.started_role = row.role
            row.save(update_fields=["started_role"])
    return instance_spec(row)


def instance_spec(row: Instance) -> dict[str, Any]:
    """What its provisioner needs. A real model is given by its folder and served under the model's name."""
    if row.template is not None:
        placed = {name: row.spec[name] for name in placement.FIELDS if name in row.spec}
        set_up = {name: row.template.spec[name] for name in (RUNTIME_ENV,) if name in row.template.spec}
        return {
            **{"id": row.pk, "launch": launch_of(row), "device_indexes": devices_of(row), "placement": placed},
            **set_up,
        }
    spec = {
        **row.spec,
        "id": row.pk,
        "model": row.model.name,
        "role": row.role_at_start,
        "max_num_seqs": row.max_num_seqs,
        "context_tokens": row.model.context_tokens,
        "url": row.url,
    }
    if row.spec.get("executor") == "torch":
        spec |= {"model": row.spec["folder"], "served_model_name": row.model.name, "tensor_parallel": row.tp}
    if row.spec.get("device") == "cuda":  # if its host lists no devices it uses those that it finds
        spec |= {"device_indexes": devices_of(row)}
    return spec


def _wanted(row: Instance, run: datetime | None, outstanding: Mapping[str, int] | None) -> Wanted:
    return Wanted(
        id=row.pk,
        desired=row.desired_state,
        state=row.observed_state,
        since=_since(row),
        url=row.url,
        error=row.error,
        run=run.timestamp() if run else None,
        replaceable=row.abilities.starts,
        start_limit_s=START_TIMEOUT_S if row.template is None else row.template.start_limit_s,
        outstanding=None if outstanding is None else outstanding.get(row.pk, 0),
    )


def _since(row: Instance) -> float:
    """When its desired state began, or will begin. An instance whose `start_after` is not a time never starts, and its
    row says why; other desired states take effect nevertheless."""
    at = row.desired_at.timestamp()
    if not row.abilities.starts or row.desired_state != Instance.Desired.RUNNING:
        return at
    later = start_after(row.spec)
    if later is None:
        wrong = start_refused(row.spec, at)["start_after"]
        instance_error_set(instance_id=row.pk, error=f"does not start: spec.start_after {wrong}")
        return math.inf
    return max(at, later)


def instance_error_set(*, instance_id: str, error: str) -> None:
    """Store on its row what keeps it from its desired state; the next observation clears it. Gateways no longer expect
    one that cannot start."""
    if Instance.objects.filter(pk=instance_id).exclude(error=error).update(error=error, updated_at=timezone.now()):
        config_version_raise()


def _close_former_run(row: Instance, step: Mark) -> bool:
    """End its provisioned time when it was last seen, not now. False if it has ended already."""
    if step.started_at is None:
        return False
    started = datetime.fromtimestamp(step.started_at, UTC)
    interval = row.intervals.filter(ended_at__isnull=True, started_at__lt=started).first()
    if interval is None:
        return False
    interval.ended_at = min(started, max(interval.started_at, row.observed_at or interval.started_at))
    interval.save(update_fields=["ended_at"])
    InstanceInterval.objects.create(instance=row, role=row.role, unit_cost=row.unit_cost, started_at=started)
    return True


def _recent_failures(row: Instance) -> int:
    since = timezone.now() - FAILURES_WINDOW
    failed = Instance.objects.filter(model=row.model, role=row.role, observed_state=Instance.Observed.FAILED)
    return failed.filter(stopped_at__gte=since).count()


def _decide(
    row: Instance,
    kind: str,
    reason: str,
    key: str,
    inputs: Mapping[str, Any],
    outcome: Mapping[str, Any] | None = None,
) -> Decision | None:
    decision = decision_record(
        actor=RECONCILER,
        kind=kind,
        subject_type="instance",
        subject=row.pk,
        reason=reason,
        inputs=inputs,
        outcome=outcome,
        idempotency_key=f"instance:{row.pk}:{row.generation}:{key}",
    )
    return decision if decision.is_new else None
