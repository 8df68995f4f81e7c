"""Valid rows with one line. Each takes overrides; names are unique within a session."""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import count
from typing import Any

from django.contrib.auth.models import Group, User
from django.db import connection
from django.utils import timezone

from controller.core.types import RequestRecord, StoredRecord
from controller.models import (
    Host,
    Instance,
    PriorityMapping,
    ScalingPolicy,
    ScalingSample,
    ServedModel,
    SLOClass,
    Tenant,
)
from controller.services.actors import Actor
from controller.services.records.requests import records_write
from controller.services.slo.api_keys import NewKey, api_key_create

_serial = count(1)
ACTOR = Actor.person("olga")
LEVEL = {
    "ttft_s": 1.0, "tpot_s": 0.1, "ttft_min_s": 0.75, "ttft_max_s": 1.25, "tpot_min_s": 0.075, "tpot_max_s": 0.125,
}  # fmt: skip
NOON = 1_792_584_000.0  # 2026-10-21 12:00:00 UTC, for records


def tenant(**fields: Any) -> Tenant:
    return Tenant.objects.create(**{"name": f"tenant-{next(_serial)}", **fields})


def api_key(owner: Tenant | None = None, **fields: Any) -> NewKey:
    return api_key_create(actor=ACTOR, tenant=owner or tenant(), **{"name": f"key-{next(_serial)}", **fields})


def addressed() -> dict[str, Any]:
    """One row for each kind of key in the addresses of pages."""
    owner = tenant()
    return {
        "class_id": slo_class().pk,
        "mapping_id": priority_mapping().pk,
        "tenant_id": owner.pk,
        "key_id": api_key(owner).key.pk,
        "instance_id": instance().pk,
        "policy_id": scaling_policy().pk,
    }


def slo_class(**fields: Any) -> SLOClass:
    return SLOClass.objects.create(**{"name": f"class-{next(_serial)}", "ttft_s": 1.0, "tpot_s": 0.1, **fields})


def slo_class_elsewhere(**fields: Any) -> None:
    """The same on a connection of its own, as another process would."""

    def save() -> None:
        try:
            slo_class(**fields)
        finally:
            connection.close()

    other = threading.Thread(target=save)
    other.start()
    other.join()


def rival_class(monkeypatch: Any, save: Any = None, **fields: Any) -> None:
    """Somebody else saves this class in the moment after all checks of the next one have passed."""
    checked = SLOClass.validate_constraints

    def meanwhile(row: SLOClass, *args: Any) -> None:
        checked(row, *args)
        monkeypatch.setattr(SLOClass, "validate_constraints", checked)
        (save or slo_class)(**fields)

    monkeypatch.setattr(SLOClass, "validate_constraints", meanwhile)


def priority_mapping(**fields: Any) -> PriorityMapping:
    return PriorityMapping.objects.create(**{"levels": [LEVEL], **fields})


def served_model(**fields: Any) -> ServedModel:
    return ServedModel.objects.create(**{"name": f"model-{next(_serial)}", **fields})


def host(**fields: Any) -> Host:
    return Host.objects.create(**{"name": f"host-{next(_serial)}", **fields})


def instance(model: ServedModel | None = None, **fields: Any) -> Instance:
    """Ready and serving, unless told otherwise."""
    serial = next(_serial)
    defaults = {
        "id": f"engine-{serial}",
        "backend": "reference",
        "provisioner": "process",
        "url": f"http://127.0.0.1:{20_000 + serial}",
        "observed_state": Instance.Observed.READY,
    }
    return Instance.objects.create(model=model or served_model(), **{**defaults, **fields})


def scaling_policy(model: ServedModel | None = None, **fields: Any) -> ScalingPolicy:
    return ScalingPolicy.objects.create(model=model or served_model(), **{"warm": 0, **fields})


def user(role: str = "", **fields: Any) -> User:
    """A person with password "secret" and, if named, the role."""
    person = User.objects.create_user(**{"username": f"user-{next(_serial)}", "password": "secret", **fields})
    if role:
        person.groups.add(Group.objects.get_or_create(name=role)[0])
    return person


def record(**fields: Any) -> RequestRecord:
    """A streamed request that was served in time, as a gateway hands it to records_write."""
    defaults: dict[str, Any] = {
        "id": f"req-{next(_serial)}",
        "arrived_at": NOON,
        "tenant": "acme",
        "slo_class": "interactive",
        "model": "demo",
        "priority": None,
        "instance": "engine-1",
        "outcome": "ok",
        "error_code": "",
        "http_status": 200,
        "streamed": True,
        "judged_by": "tokens",
        "prompt_tokens": 100,
        "output_tokens": 20,
        "target_ttft_s": 1.0,
        "target_tpot_s": 0.1,
        "target_deadline_s": None,
        "waiting_time_s": 5.0,
        "queue_s": 0.01,
        "ttft_s": 0.2,
        "tpot_s": 0.05,
        "e2e_s": 1.15,
        "ttft_met": True,
        "tpot_met": True,
        "deadline_met": True,
        "attained": True,
        "goodput_tokens": 20,
        "attempts": 1,
        "workflow": "",
        "stage": "",
        "decisions": [{"kind": "dispatch", "reason": "fits"}],
        "token_times": [0.2, 0.25, 0.35, 1.15],
    }
    return RequestRecord(**{**defaults, **fields})


def records_stored(*records: StoredRecord) -> int:
    """How many of them were new."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")  # opens the test's transaction, which then holds the writer's as a savepoint
    return records_write(connection=connection.connection, records=records)


def scaling_sample(policy: ScalingPolicy, ago_s: float = 0.0, **fields: Any) -> ScalingSample:
    given = {"load": 0.5, "ready": 2, "starting": 0, "draining": 0, "mind": "steady", **fields}
    return ScalingSample.objects.create(policy=policy, at=timezone.now() - timedelta(seconds=ago_s), **given)
