"""Instances: their desired state, and what was seen of them (observed state).

Changes of the desired state are decisions and audited; observations are facts and are not. Both reach the gateways, and
both are idempotent. A Celery task brings an instance to its desired state through its provisioner.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controller.core.addresses import url_problem
from controller.core.types import DEFAULT_MAX_NUM_SEQS, KEY_MADE
from controller.engine import placement
from controller.engine.process_spec import refusal, values_refused, values_refused_of_all
from controller.engine.runtime_env import RUNTIME_ENV
from controller.models import Device, Host, Instance, InstanceInterval, LaunchTemplate, ServedModel
from controller.models.fleet import KvRole, Role, Weights
from controller.scale.provisioning import PROCESS, STATIC, Hosts
from controller.services import change
from controller.services.actors import Actor
from controller.services.config import config_version_raise
from controller.services.fleet.devices import devices_hold, devices_move
from controller.services.fleet.launch_templates import FACTS, fields_from

Desired, Observed = Instance.Desired, Instance.Observed
_OBSERVED = (
    "observed_state",
    "url",
    "error",
    "observed_at",
    "observed_generation",
    "ready_at",
    "stopped_at",
    "updated_at",
)
EDITABLE = ("max_num_seqs", "unit_cost", "device_kind", "tp", "host", "spec", "key_name")
ONE_SIDED: dict[str, str] = {
    KvRole.PRODUCER: Role.DECODE,
    KvRole.CONSUMER: Role.PREFILL,
}  # what each cannot become
FROM_TEMPLATE = {"folder", "start_after", *FACTS}  # what the spec of an instance with a template may have
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # of a file
SPEC_CHECKED_WITH = {"spec", "tp", "max_num_seqs"}  # whose changes may be at odds with the spec
PLACED_BY = {"device_kind", "tp", "host"}


def instance_register(
    *,
    actor: Actor,
    id: str,
    model: ServedModel,
    url: str,
    backend: str = "vllm",
    role: str = Role.COLLOCATED,
    host: Host | None = None,
    device_kind: str = "",
    tp: int = 1,
    max_num_seqs: int | None = None,
    unit_cost: float = 1.0,
    spec: Mapping[str, Any] | None = None,
    key_name: str = "",
) -> Instance:
    """Register an endpoint that Slackline does not run (provisioner `static`). It serves once it was observed ready.

    `role`: also recorded as the role it was started in, whichever it gets later. `max_num_seqs` None: what the endpoint
    reports.
    """
    row = Instance(
        id=id,
        model=model,
        url=url.rstrip("/"),
        backend=backend,
        provisioner=STATIC,
        role=role,
        started_role=role,
        host=host,
        device_kind=device_kind,
        tp=tp,
        **_seqs(max_num_seqs),
        unit_cost=unit_cost,
        spec=dict(spec or {}),
        key_name=key_name,
    )
    with transaction.atomic():
        change.create(row, actor=actor, kind="instance", check=_check)
        devices_hold(row=row)
    return row


def instance_create(
    *,
    actor: Actor,
    model: ServedModel,
    id: str | None = None,
    backend: str = "reference",
    provisioner: str = PROCESS,
    template: LaunchTemplate | None = None,
    role: str = Role.COLLOCATED,
    host: Host | None = None,
    devices: Iterable[Device] = (),
    device_kind: str = "",
    tp: int = 1,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    unit_cost: float = 1.0,
    spec: Mapping[str, Any] | None = None,
) -> Instance:
    """Create an instance; its provisioner starts it and finds its URL. It holds `devices`, or free ones of its host.
    Raises ValidationError if another instance holds them, or too few are free.

    With a `template` it is started by that template's command; its backend and key follow from it, and it raises
    ValidationError while the template is paused. With `weights` "absent" in its `spec` it starts as a
    warm spare, and serves once its weights are loaded.
    """
    own: dict[str, Any] = {"backend": backend, "spec": dict(spec or {})}
    if template is not None:
        own |= fields_from(template, role, own["spec"])
    row = Instance(
        id=id or f"{own['backend']}-{secrets.token_hex(4)}",
        model=model,
        provisioner=provisioner,
        template=template,
        role=role,
        host=host,
        device_kind=device_kind,
        tp=tp,
        max_num_seqs=max_num_seqs,
        unit_cost=unit_cost,
        **own,
        weights=Weights.ABSENT if (spec or {}).get("weights") == Weights.ABSENT else Weights.PRESENT,
    )
    with transaction.atomic():
        change.create(row, actor=actor, kind="instance", check=_check)
        devices_hold(row=row, devices=devices)
    return row


def instance_update(*, actor: Actor, instance_id: str, version: int | None, changes: Mapping[str, Any]) -> Instance:
    """`max_num_seqs` None: what the endpoint reports; only for registered instances."""
    if "max_num_seqs" in changes:
        changes = {**changes, **_seqs(changes["max_num_seqs"])}
    with transaction.atomic():
        before = instance_locked(instance_id, version).version
        row = change.update(
            Instance,
            instance_id,
            actor=actor,
            kind="instance",
            version=version,
            changes=changes,
            editable=(*EDITABLE, "seqs_unsaid"),
            check=partial(_check, new_spec=not SPEC_CHECKED_WITH.isdisjoint(changes)),
        )
        if row.version != before and PLACED_BY & changes.keys():
            devices_move(row=row)
    return row


def instance_drain(*, actor: Actor, instance_id: str, version: int | None = None) -> Instance:
    """Send no new requests there; those that run may finish. It is stopped once it is empty."""
    return _set_desired_state(actor, instance_id, Desired.DRAINING, "drained", version)


def instance_undrain(*, actor: Actor, instance_id: str, version: int | None = None) -> Instance:
    """Take a drain back. Raises ValidationError if the instance was stopped meanwhile."""
    return _set_desired_state(actor, instance_id, Desired.RUNNING, "undrained", version)


def instance_stop(*, actor: Actor, instance_id: str, version: int | None = None) -> Instance:
    """Stop it at once, whatever runs there. This is final: a new instance gets a new id."""
    return _set_desired_state(actor, instance_id, Desired.STOPPED, "stopped", version)


def instance_set_role(*, actor: Actor, instance_id: str, role: str, version: int | None = None) -> Instance:
    """Send it requests of this role from now on; those that run there finish there. Cost counts in the new role.

    For engines that serve either stage of a request at any time (the reference engine, vLLM with `kv_both`).
    """
    if role not in Role.values:
        raise ValidationError({"role": f"Unknown role {role!r}. Must be one of: {', '.join(Role.values)}."})
    with transaction.atomic():
        row = instance_locked(instance_id, version)
        before = row.role
        if before == role:
            return row
        if row.desired_state == Desired.STOPPED:
            raise ValidationError({"role": f"{row} is stopped. The role of a stopped instance cannot change."})
        _check_role(row, role)
        at = timezone.now()
        row.role, row.version = role, row.version + 1
        row.save(update_fields=["role", "version", "updated_at"])
        if row.intervals.filter(ended_at__isnull=True).exists():
            _interval_close(row, at)
            _interval_open(row, at)
        change.audit(actor, "instance", "role_set", row, {"before": {"role": before}, "after": {"role": role}})
        config_version_raise()
    return row


def instance_observe(
    *,
    instance_id: str,
    observed_state: str,
    url: str | None = None,
    generation: int | None = None,
    error: str = "",
    at: datetime | None = None,
    new_run: bool = False,
) -> bool:
    """Store what a provisioner saw. True if that changed something, in which case gateways are told. `generation`: of
    the desired state that it acted on. `new_run`: its process was started again since it was last seen."""
    at = at or timezone.now()
    with transaction.atomic():
        row = Instance.objects.select_for_update().get(pk=instance_id)
        before = (row.observed_state, row.url, row.error)
        row.observed_state, row.error, row.observed_at = observed_state, error, at
        row.url = row.url if url is None else url.rstrip("/")
        row.observed_generation = max(row.observed_generation, generation or 0)
        if observed_state == Observed.READY and (new_run or before[0] != Observed.READY):
            row.ready_at = at
        if observed_state in Instance.GONE and before[0] not in Instance.GONE:
            row.stopped_at = at
            row.holdings.filter(released_at__isnull=True).update(released_at=at)
        if row.url and row.observed_state not in Instance.GONE:
            # The instance that was last seen at a URL is the one there; an older row with the same URL is out of date.
            Instance.objects.filter(url=row.url).exclude(pk=row.pk).exclude(observed_state__in=Instance.GONE).update(
                url=""
            )
        row.save(update_fields=_OBSERVED)
        _account(row, at)
        news = before != (row.observed_state, row.url, row.error)
        if news:
            config_version_raise()
    return news


def instance_remove(*, actor: Actor, instance_id: str, version: int | None = None) -> None:
    """Delete a stopped or failed instance and its cost history. One that Slackline does not run can be deleted as soon
    as its desired state is stopped, and so can one that was never seen on its cluster, which may not exist: an engine
    of it that is found there after all is stopped."""
    with transaction.atomic():
        row = instance_locked(instance_id, version)
        seen = row.observed_state
        if row.desired_state != Desired.STOPPED:
            raise ValidationError({"desired_state": f"{row} is {seen}. Stop it before you remove it."})
        never = row.abilities.hosts == Hosts.CLUSTER and seen == Observed.PENDING and row.observed_at is None
        if seen not in Instance.GONE and not row.abilities.registers and not never:  # no process of ours
            told = f"{row} is stopping and still {seen}. Try again in a few seconds, once it has ended."
            raise ValidationError({"desired_state": told})
        change.remove(Instance, instance_id, actor=actor, kind="instance")


def _set_desired_state(actor: Actor, instance_id: str, wanted: str, what: str, version: int | None) -> Instance:
    with transaction.atomic():
        row = instance_locked(instance_id, version)
        before = row.desired_state
        if before == wanted:
            return row
        if before == Desired.STOPPED:
            raise ValidationError(
                {"desired_state": f"{row} is stopped and cannot be started again. Create a new instance."}
            )
        row.desired_state, row.desired_at = wanted, timezone.now()
        row.generation, row.version = row.generation + 1, row.version + 1
        row.save(update_fields=["desired_state", "desired_at", "generation", "version", "updated_at"])
        inputs = {"before": {"desired_state": before}, "after": {"desired_state": wanted}}
        change.audit(actor, "instance", what, row, inputs)
        config_version_raise()
    return row


def instance_locked(instance_id: str, version: int | None) -> Instance:
    """The instance, locked until the transaction ends. Raises DoesNotExist, and VersionConflict unless `version` is
    None or current."""
    row = Instance.objects.select_for_update().get(pk=instance_id)
    if version is not None and row.version != version:
        raise change.VersionConflict(str(row), version, row.version)
    return row


def _account(row: Instance, at: datetime) -> None:
    """Provisioned time runs from the first observation to the last, in the role that it has."""
    if row.observed_state in Instance.GONE:
        _interval_close(row, at)
    elif row.observed_state != Observed.PENDING:
        _interval_open(row, at)


def _interval_open(row: Instance, at: datetime) -> None:
    if not row.intervals.filter(ended_at__isnull=True).exists():
        InstanceInterval.objects.create(instance=row, role=row.role, unit_cost=row.unit_cost, started_at=at)


def _interval_close(row: Instance, at: datetime) -> None:
    row.intervals.filter(ended_at__isnull=True).update(ended_at=at)


def _seqs(number: int | None) -> dict[str, Any]:
    """If unset, a default is stored as well, for gateways of a version that expects a number and would use the same."""
    return {"max_num_seqs": DEFAULT_MAX_NUM_SEQS if number is None else number, "seqs_unsaid": number is None}


def _check(row: Instance, new_spec: bool = True) -> None:
    if row.url and row.abilities.registers and (problem := url_problem(row.url, settings.ENGINE_NETWORKS)):
        raise ValidationError({"url": problem})
    if row.abilities.registers and not row.url:
        raise ValidationError({"url": "Required for a static instance."})
    if row.template is not None and not row.abilities.starts:
        raise ValidationError({"template": "Only for an instance that Slackline starts."})
    if row.abilities.hosts == Hosts.CLUSTER and row.host is not None:
        raise ValidationError({"host": "Not for an engine on a cluster, which chooses the node itself."})
    if row.abilities.starts and row.template is None and row.abilities.hosts == Hosts.CLUSTER:
        raise ValidationError({"template": "Required: engines on a cluster are started from a launch template only."})
    if row.abilities.starts and row.template is None and row.backend != "reference":
        raise ValidationError({"template": f"Required: Slackline starts {row.backend} from a launch template only."})
    if row.key_name not in ("", KEY_MADE) and not row.abilities.registers:
        raise ValidationError({"key_name": "Only for a static instance; others get a key from Slackline."})
    if row.key_name not in ("", KEY_MADE) and not KEY_NAME.fullmatch(row.key_name):
        raise ValidationError({"key_name": "Use letters, digits and . _ - and start with a letter or digit."})
    if row.seqs_unsaid and not row.abilities.registers:
        raise ValidationError({"max_num_seqs": "Required, except for a static instance, which may report it itself."})
    if not isinstance(row.spec, dict):
        raise ValidationError({"spec": "Must be an object."})
    if new_spec:
        _check_spec(row)
    if "kv_role" in row.spec and (row.backend != "vllm" or row.kv_role not in KvRole.values):
        raise ValidationError({"spec": f"kv_role is for vLLM only and must be one of: {', '.join(KvRole.values)}."})
    _check_role(row, row.role)


def _check_spec(row: Instance) -> None:
    """Check the whole spec of an instance that is started here; of a registered one only the fields that are read."""
    own = row.abilities.starts
    if own and row.template is not None:
        if unknown := sorted(set(row.spec) - FROM_TEMPLATE):
            known = ", ".join(sorted(FROM_TEMPLATE))
            raise ValidationError({"spec": f"unknown: {', '.join(unknown)}; beside its template: {known}."})
        if wrong := placement.problems(row.spec):
            raise ValidationError({f"spec.{name}": why for name, why in wrong.items()})
        if RUNTIME_ENV in row.template.spec and row.abilities.hosts != Hosts.CLUSTER:
            told = f"{row.template} has a {RUNTIME_ENV}, which only a Ray cluster sets up."
            raise ValidationError({"template": told})
    elif own and (refused_whole := refusal(row.spec)):
        raise ValidationError({"spec": refused_whole})
    now = timezone.now().timestamp()
    if own:
        refused = values_refused(row.spec, now, row.max_num_seqs, row.ranks)
    else:
        refused = values_refused_of_all(row.spec, now)
    if refused:
        raise ValidationError({f"spec.{name}": why for name, why in refused.items()})


def _check_role(row: Instance, role: str) -> None:
    if row.ranks > 1 and role != Role.COLLOCATED:
        raise ValidationError({"role": f"{row} has {row.ranks} tensor-parallel ranks, so its role must be collocated."})
    if ONE_SIDED.get(row.kv_role) == role:
        raise ValidationError({"role": f"{row} was started with kv_role {row.kv_role} and cannot {role}."})
