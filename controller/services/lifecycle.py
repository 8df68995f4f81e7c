"""Records what the reconciler saw and decided about instances: one Decision a transition, however often it is said."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from controller.core.process_spec import start_after, start_refused
from controller.models import Action, Decision, Instance, InstanceInterval
from controller.models.fleet import Weights
from controller.scale.lifecycle import FoundAwake, Mark, Replace, StopWanted, Wanted, pause_before_start
from controller.selectors.topology import free_among, usable_devices
from controller.services.actions import Kind, sleep_ended, weights_lost
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.giving_up import GivenUp, given_up, never_ready_in_a_row
from controller.services.instances import instance_create, instance_observe, instance_stop
from controller.services.scaling_stages import NO_DEVICE, STARTABLE, like

RECONCILER = Actor.job("reconciler")
FAILURES_WINDOW = timedelta(minutes=5)
KINDS = {
    "starting": "instance_started",
    "ready": "instance_ready",
    "draining": "instance_draining",
    "unreachable": "instance_unreachable",
    "stopped": "instance_gone",
}


def wanted_instances(outstanding: Mapping[str, int] | None) -> list[Wanted]:
    """Every live row. `outstanding` None: no gateway tells; an instance that none names has nothing to do."""
    runs = dict(
        InstanceInterval.objects.filter(ended_at__isnull=True).values_list("instance_id", "started_at")
    )  # a row's run began no later than its open interval
    return [_wanted(row, runs.get(row.pk), outstanding) for row in Instance.objects.live()]


def instance_mark(*, step: Mark) -> list[Decision]:
    """The recorded state follows what was seen. Empty: it did already (compared under the row's lock)."""
    at = timezone.now()
    with transaction.atomic():
        row = Instance.objects.select_for_update().get(pk=step.id)
        again = step.again and _close_former_run(row, step)
        if row.observed_state == step.state and row.url == (step.url or row.url) and not again:
            return []
        waited_s = round((at - row.desired_at).total_seconds(), 2)
        inputs = {"was": row.observed_state, "url": step.url, "error": step.error, "since_wish_s": waited_s}
        instance_observe(
            instance_id=row.pk,
            observed_state=step.state,
            url=step.url or None,
            generation=row.generation,
            error=step.error,
            at=at,
        )
        woke = weights_lost(actor=RECONCILER, row=row) if again else None
        seen = decision_record(
            actor=RECONCILER,
            kind=KINDS[step.state],
            subject_type="instance",
            subject=row.pk,
            reason=step.reason,
            inputs=inputs,
        )
    return [seen] if woke is None else [seen, woke]


def instance_found_awake(*, step: FoundAwake) -> Decision | None:
    """An endpoint that somebody else runs says that it is awake: he woke it, or started it again. None: not believed.

    What somebody woke from a sleep that kept no copy of the weights may be awake without them, and only our own wake-up
    reads them again; so may an SGLang, which says that it is ready although its memory was released. Those are believed
    if they were away since they fell asleep: then it is another process, and whole.
    """
    with transaction.atomic():
        row = Instance.objects.select_for_update().get(pk=step.id)
        if row.weights != Weights.ASLEEP or row.version != step.version:
            return None  # what was seen is older than what the row says
        whole = row.backend == "reference" or (row.backend == "vllm" and row.sleep_level == 1)
        if not whole and not _away_since_asleep(row):
            return None
        return sleep_ended(actor=RECONCILER, row=row, weights=Weights.PRESENT, reason="found_awake")


def _away_since_asleep(row: Instance) -> bool:
    """It became ready later than the last order ended that had it asleep."""
    orders = Action.objects.filter(instance=row, kind__in=(Kind.SLEEP, Kind.WAKE, Kind.WEIGHTS_LOAD))
    asleep_at = orders.aggregate(at=Max("ended_at"))["at"]
    return asleep_at is not None and row.ready_at is not None and row.ready_at > asleep_at


def instance_replace(*, step: Replace) -> Decision | None:
    """The instance has failed for good: another of its kind is wished for, later the more failed lately, unless that
    would fail as well."""
    with transaction.atomic():
        row = Instance.objects.select_for_update(of=("self",)).select_related("model", "host").get(pk=step.id)
        failures = _recent_failures(row) + 1
        pause, never_ready = pause_before_start(failures), never_ready_in_a_row(row)
        new_id = f"{row.backend}-{secrets.token_hex(3)}"
        inputs = {"error": step.error, "failures_5min": failures, "was": row.observed_state, "never_ready": never_ready}
        if (end := given_up(row, step, never_ready)) is not None:
            return _give_up(row, end, inputs)
        inputs["pause_s"] = pause
        blocked = _without_device(row)
        outcome = {"held": NO_DEVICE} if blocked else {"replacement": new_id}
        decision = _decide(row, "instance_replaced", step.reason, "replaced", inputs, outcome)
        if decision is None:
            return None
        instance_observe(instance_id=row.pk, observed_state=Instance.Observed.FAILED, error=step.error)
        instance_stop(actor=RECONCILER, instance_id=row.pk)
        if blocked:
            return decision
        # A sleeper serves nobody: what replaces it must not undo the scaling in that put it to sleep.
        pattern = like(row, warm=row.weights in (Weights.ABSENT, Weights.ASLEEP, Weights.LEAVING))
        if pause:
            pattern["spec"]["start_after"] = (timezone.now() + timedelta(seconds=pause)).timestamp()
        instance_create(actor=RECONCILER, id=new_id, model=row.model, **pattern)
    return decision


def _give_up(row: Instance, end: GivenUp, inputs: Mapping[str, Any]) -> Decision | None:
    decision = _decide(row, "instance_given_up", end.reason, "given_up", inputs)
    if decision is not None:
        instance_observe(instance_id=row.pk, observed_state=Instance.Observed.FAILED, error=end.error)
        instance_stop(actor=RECONCILER, instance_id=row.pk)
    return decision


def _without_device(row: Instance) -> bool:
    """Too few for another one like it, although its own are free once it has failed."""
    usable = list(usable_devices(row.host, row.device_kind)) if row.host else []
    own = row.holdings.filter(released_at__isnull=True, device__in=usable).count()
    return bool(usable) and len(free_among(usable)) + own < row.tp


def instance_end_drain(*, step: StopWanted) -> Decision | None:
    """What was drained is stopped, unless somebody wants it again since."""
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
    """They were there just now: what a restart after an outage takes as the end of the former run."""
    return Instance.objects.filter(pk__in=list(ids)).update(observed_at=timezone.now())


def instance_start(*, instance_id: str) -> tuple[str, dict[str, Any]]:
    """Its provisioner's name, and what that needs to know to start it.

    The role that it has now becomes that of its start, for good: what a provisioner was told once it may tell the
    engine again at each later start, whatever role the instance was given meanwhile.
    """
    with transaction.atomic():
        row = Instance.objects.select_for_update(of=("self",)).select_related("model").get(pk=instance_id)
        if not row.started_role:
            row.started_role = row.role
            row.save(update_fields=["started_role"])
    return row.provisioner, instance_spec(row)


def instance_spec(row: Instance) -> dict[str, Any]:
    """What its provisioner needs to know. A real model is named by its folder and served under the model's name."""
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
    if row.spec.get("device") == "cuda":  # where its host lists none it runs on what it finds
        held = row.holdings.filter(released_at__isnull=True).order_by("device__index")
        spec |= {"device_indexes": list(held.values_list("device__index", flat=True))}
    return spec


def _wanted(row: Instance, run: datetime | None, outstanding: Mapping[str, int] | None) -> Wanted:
    return Wanted(
        id=row.pk,
        desired=row.desired_state,
        state=row.observed_state,
        since=_since(row),
        url=row.url,
        run=run.timestamp() if run else None,
        replaceable=row.provisioner in STARTABLE,
        outstanding=None if outstanding is None else outstanding.get(row.pk, 0),
    )


def _since(row: Instance) -> float:
    """When its wish began, or will. One whose `start_after` is no time never starts, and says why; whatever else is
    wished for it happens all the same."""
    at = row.desired_at.timestamp()
    if row.provisioner not in STARTABLE or row.desired_state != Instance.Desired.RUNNING:
        return at
    later = start_after(row.spec)
    if later is None:
        wrong = start_refused(row.spec, at)["start_after"]
        instance_trouble(instance_id=row.pk, error=f"does not start: spec.start_after {wrong}")
        return math.inf
    return max(at, later)


def instance_trouble(*, instance_id: str, error: str) -> None:
    """What keeps it from what is wished, said on its row; what is observed next takes it away."""
    Instance.objects.filter(pk=instance_id).exclude(error=error).update(error=error, updated_at=timezone.now())


def _close_former_run(row: Instance, step: Mark) -> bool:
    """Its provisioned time ends when it was last seen, not when somebody looked again. False: it is closed already."""
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
