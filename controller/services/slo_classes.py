"""SLO classes: what is promised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError

from controller.models import SLOClass, Tenant
from controller.services import change
from controller.services.actors import Actor

EDITABLE = ("title", "ttft_s", "tpot_s", "deadline_s", "waiting_time_s", "target", "value", "may_defer")


def slo_class_create(
    *,
    actor: Actor,
    name: str,
    ttft_s: float,
    tpot_s: float,
    tenant: Tenant | None = None,
    title: str = "",
    deadline_s: float | None = None,
    waiting_time_s: float = 5.0,
    target: float = 0.95,
    value: float = 1.0,
    may_defer: bool = False,
) -> SLOClass:
    """Seconds. `tenant` None: for all tenants."""
    row = SLOClass(
        tenant=tenant,
        name=name,
        title=title,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        deadline_s=deadline_s,
        waiting_time_s=waiting_time_s,
        target=target,
        value=value,
        may_defer=may_defer,
    )
    return change.create(row, actor=actor, kind="slo_class", check=_check)


def slo_class_update(*, actor: Actor, slo_class_id: int, version: int, changes: Mapping[str, Any]) -> SLOClass:
    return change.update(
        SLOClass,
        slo_class_id,
        actor=actor,
        kind="slo_class",
        version=version,
        changes=changes,
        editable=EDITABLE,
        check=_check,
    )


def slo_class_remove(*, actor: Actor, slo_class_id: int, version: int | None = None) -> None:
    """Tenants that had it as their default have none then."""
    change.remove(SLOClass, slo_class_id, actor=actor, kind="slo_class", version=version)


def _check(row: SLOClass) -> None:
    if row.deadline_s is not None and row.deadline_s < row.ttft_s:
        raise ValidationError({"deadline_s": "Must not be before the first token is due (ttft_s)."})
