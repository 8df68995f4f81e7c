"""Tenants and their quotas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError

from controller.models import SLOClass, Tenant
from controller.services import change
from controller.services.actors import Actor
from controller.services.replace import Expected, put, with_defaults

EDITABLE = ("title", "default_class", "rpm", "tpm", "max_concurrency", "state")


def tenant_create(
    *,
    actor: Actor,
    name: str,
    title: str = "",
    default_class: SLOClass | None = None,
    rpm: int | None = None,
    tpm: int | None = None,
    max_concurrency: int | None = None,
    state: str = Tenant.State.ACTIVE,
) -> Tenant:
    row = Tenant(
        name=name,
        title=title,
        default_class=default_class,
        rpm=rpm,
        tpm=tpm,
        max_concurrency=max_concurrency,
        state=state,
    )
    return change.create(row, actor=actor, kind="tenant", check=_check)


def tenant_update(*, actor: Actor, tenant_id: int, version: int | None, changes: Mapping[str, Any]) -> Tenant:
    """The name never changes, since records and decisions refer to it. `state` "suspended" disables all its keys."""
    return change.update(
        Tenant, tenant_id, actor=actor, kind="tenant", version=version, changes=changes, editable=EDITABLE, check=_check
    )


def tenant_put(*, actor: Actor, name: str, values: Mapping[str, Any], expected: Expected) -> tuple[Tenant, bool]:
    """Create the tenant or replace its values; whether it was created. Absent values get their default, except
    `state`: a tenant that an admin has suspended stays suspended until somebody says otherwise."""

    def change_to(row: Tenant) -> Tenant:
        changes = with_defaults(Tenant, values, EDITABLE, kept=("state",))
        return tenant_update(actor=actor, tenant_id=row.pk, version=row.version, changes=changes)

    return put(
        Tenant,
        {"name": name},
        expected=expected,
        create=lambda: tenant_create(actor=actor, name=name, **values),
        change=change_to,
    )


def tenant_remove(*, actor: Actor, tenant_id: int, version: int | None = None) -> None:
    """Delete the tenant with its keys and its own classes. Its records stay."""
    change.remove(Tenant, tenant_id, actor=actor, kind="tenant", version=version)


def _check(tenant: Tenant) -> None:
    own = tenant.default_class
    if own is not None and own.tenant_id not in (None, tenant.pk):
        raise ValidationError(
            {"default_class": "This class belongs to another tenant. Choose a shared class or one of this tenant."}
        )
