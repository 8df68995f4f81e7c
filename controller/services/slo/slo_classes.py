"""SLO classes: the targets of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controller.models import SLOClass, Tenant
from controller.services import change
from controller.services.actors import Actor
from controller.services.replace import ExpectedVersion, defaults_of, put
from controller.services.slo.tenants import tenant_update
from controller.slo.classes import is_level_label

UNIQUE = "slo_class_unique"  # the constraint's name
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
    """Times in seconds. `tenant` None: a class of all tenants. Raises ValidationError, on `name` if it is taken, also
    if that happened after the check."""
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
    try:
        return change.create(row, actor=actor, kind="slo_class", check=_check_new)
    except IntegrityError as error:
        if _constraint(error) != UNIQUE:
            raise
        raise _taken(tenant) from error


def slo_class_update(*, actor: Actor, slo_class_id: int, version: int | None, changes: Mapping[str, Any]) -> SLOClass:
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


def slo_class_put(
    *, actor: Actor, name: str, tenant: Tenant | None, values: Mapping[str, Any], expected: ExpectedVersion
) -> tuple[SLOClass, bool]:
    """Create the class or replace its values; whether it was created. Absent values get their default."""

    absent = defaults_of(SLOClass, values, EDITABLE)

    def change_to(row: SLOClass) -> SLOClass:
        return slo_class_update(actor=actor, slo_class_id=row.pk, version=row.version, changes={**absent, **values})

    return put(
        SLOClass,
        {"name": name, "tenant": tenant},
        expected=expected,
        absent=absent,
        create=lambda: slo_class_create(actor=actor, name=name, tenant=tenant, **values),
        change=change_to,
    )


def slo_class_remove(*, actor: Actor, slo_class_id: int, version: int | None = None) -> None:
    """Tenants that have it as their default class have none then. Each is changed first, and the decision names
    them."""

    def clear_defaults(row: SLOClass) -> dict[str, Any]:
        names = [_without_default(tenant, actor) for tenant in _tenants_by_default(row.pk)]
        inputs = {"default_of": names}
        return inputs if names else {}

    with transaction.atomic():
        # Tenants are locked before the class, as in a change or removal of a tenant, and all of them before the first
        # change raises the configuration version. In any other order two writers could deadlock.
        _tenants_by_default(slo_class_id)
        change.remove(SLOClass, slo_class_id, actor=actor, kind="slo_class", version=version, first=clear_defaults)


def _tenants_by_default(slo_class_id: int) -> list[Tenant]:
    """Tenants that have it as their default class, by name, locked."""
    return list(Tenant.objects.select_for_update().filter(default_class=slo_class_id).order_by("name"))


def _without_default(tenant: Tenant, actor: Actor) -> str:
    changed = tenant_update(actor=actor, tenant_id=tenant.pk, version=tenant.version, changes={"default_class": None})
    return changed.name


def _check_new(row: SLOClass) -> None:
    """Check the name of a new class. That of a stored class cannot change, so it must not block other changes."""
    if is_level_label(row.name):
        message = f"The name {row.name} is reserved for requests that have a priority but no class."
        raise ValidationError({"name": message})
    _check(row)
    if name_is_taken(row.name, row.tenant):
        raise _taken(row.tenant)


def _check(row: SLOClass) -> None:
    if row.deadline_s is not None and row.deadline_s < row.ttft_s:
        raise ValidationError({"deadline_s": "Must not be less than ttft_s."})


def name_is_taken(name: str, tenant: Tenant | None) -> bool:
    return SLOClass.objects.filter(name=name, tenant=tenant).exists()


def name_taken(tenant: Tenant | None) -> str:
    """The error for a name that the tenant already uses (None: a class of all tenants does)."""
    return f"A class with this name already exists for {tenant.name if tenant else 'all tenants'}."


def _taken(tenant: Tenant | None) -> ValidationError:
    return ValidationError({"name": ValidationError(name_taken(tenant), code="unique")})


def _constraint(error: IntegrityError) -> str:
    """The name of the constraint that the database reports as violated."""
    return getattr(getattr(error.__cause__, "diag", None), "constraint_name", None) or ""
