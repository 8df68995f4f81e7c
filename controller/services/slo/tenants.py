"""Tenants, their quotas and entitlements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction

from controller.models import GraphVersion, Tenant
from controller.models.base import NAME
from controller.services import change
from controller.services.actors import Actor
from controller.services.replace import ExpectedVersion, defaults_of, put

QUOTAS = ("rpm", "tpm", "max_concurrency")
ENTITLEMENTS = (
    "allowed_classes",
    "allowed_models",
    "highest_priority",
    "tightest_ttft_s",
    "tightest_tpot_s",
    "tightest_deadline_s",
    "queue_share",
)
EDITABLE = ("title", "default_class", *QUOTAS, *ENTITLEMENTS, "retention_s", "stage_deadlines", "state")
MOST_NAMES = 100


def quotas_of_new_tenants() -> dict[str, int | None]:
    """The quotas of a tenant for which nobody chose any."""
    return {
        "rpm": settings.NEW_TENANT_RPM,
        "tpm": settings.NEW_TENANT_TPM,
        "max_concurrency": settings.NEW_TENANT_CONCURRENCY,
    }


def tenant_create(*, actor: Actor, name: str, **values: Any) -> Tenant:
    """`values`: of EDITABLE. Quotas that are absent get the default of new tenants; None means no limit."""
    row = Tenant(name=name, **{**quotas_of_new_tenants(), **values})
    return change.create(row, actor=actor, kind="tenant", check=_check)


def tenant_update(*, actor: Actor, tenant_id: int, version: int | None, changes: Mapping[str, Any]) -> Tenant:
    """The name never changes, since records and decisions refer to it. `state` "suspended" disables all its keys."""
    return change.update(
        Tenant, tenant_id, actor=actor, kind="tenant", version=version, changes=changes, editable=EDITABLE, check=_check
    )


def tenant_put(*, actor: Actor, name: str, values: Mapping[str, Any], expected: ExpectedVersion) -> tuple[Tenant, bool]:
    """Create the tenant or replace its values; whether it was created. Absent values get their default, except
    `state`: a tenant that an admin has suspended stays suspended until somebody says otherwise."""

    quotas = {name: value for name, value in quotas_of_new_tenants().items() if name not in values}
    absent = {**defaults_of(Tenant, values, EDITABLE, kept=("state",)), **quotas}

    def change_to(row: Tenant) -> Tenant:
        return tenant_update(actor=actor, tenant_id=row.pk, version=row.version, changes={**absent, **values})

    return put(
        Tenant,
        {"name": name},
        expected=expected,
        absent=absent,
        create=lambda: tenant_create(actor=actor, name=name, **values),
        change=change_to,
    )


@transaction.atomic
def tenant_remove(*, actor: Actor, tenant_id: int, version: int | None = None) -> None:
    """Delete the tenant with its keys, its own classes and its pattern graphs. Its records stay."""
    name = Tenant.objects.filter(pk=tenant_id).values_list("name", flat=True).first()
    GraphVersion.objects.filter(tenant=name).delete()
    change.remove(Tenant, tenant_id, actor=actor, kind="tenant", version=version)


def _check(tenant: Tenant) -> None:
    own = tenant.default_class
    if own is not None and own.tenant_id not in (None, tenant.pk):
        raise ValidationError(
            {"default_class": "This class belongs to another tenant. Choose a shared class or one of this tenant."}
        )
    for field in ("allowed_classes", "allowed_models"):
        setattr(tenant, field, _names(field, getattr(tenant, field)))
    if own is not None and tenant.allowed_classes and own.name not in tenant.allowed_classes:
        raise ValidationError({"default_class": "This class is not among the allowed classes."})


def _names(field: str, names: Any) -> list[str]:
    """Sorted, each once. A name that does not exist yet is allowed: the class or model may be created later."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValidationError({field: "Enter a list of names."})
    if len(names) > MOST_NAMES:
        raise ValidationError({field: f"Enter at most {MOST_NAMES} names."})
    for name in names:
        try:
            NAME(name)
        except ValidationError as error:
            raise ValidationError({field: f"{name[:64]!r} is not a valid name."}) from error
    return sorted(set(names))
