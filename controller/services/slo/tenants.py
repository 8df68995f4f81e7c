"""Tenants and their quotas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError

from controller.models import SLOClass, Tenant
from controller.services import change
from controller.services.actors import Actor

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
) -> Tenant:
    row = Tenant(
        name=name,
        title=title,
        default_class=default_class,
        rpm=rpm,
        tpm=tpm,
        max_concurrency=max_concurrency,
    )
    return change.create(row, actor=actor, kind="tenant", check=_check)


def tenant_update(*, actor: Actor, tenant_id: int, version: int, changes: Mapping[str, Any]) -> Tenant:
    """The name never changes, since records and decisions refer to it. `state` "suspended" disables all its keys."""
    return change.update(
        Tenant, tenant_id, actor=actor, kind="tenant", version=version, changes=changes, editable=EDITABLE, check=_check
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
