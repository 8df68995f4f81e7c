"""Versions of pattern graphs: which are published, and the newest of each tenant for the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import F, Window
from django.db.models.functions import RowNumber

from controller.models import GraphVersion
from controller.predict.answer_lengths import MOST_AGE_S, PublishedVersion
from controller.selectors.records.learned_versions import content_of, published

SHOWN = 5  # versions of a tenant


def published_graphs() -> list[PublishedVersion]:
    """The newest of each tenant that has content."""
    return published(GraphVersion, "tenant")


def published_graph_content(tenant: str, version: int) -> bytes | None:
    """None: it has none any more."""
    return content_of(GraphVersion, tenant=tenant, version=version)


@dataclass(frozen=True, slots=True)
class TenantVersions:
    """The newest versions of a tenant's pattern graphs, newest first. `in_force` is one of them; None: gateways go by
    what its clients say of their workflows."""

    tenant: str
    versions: Sequence[GraphVersion]
    in_force: GraphVersion | None


def tenant_versions(now: datetime) -> list[TenantVersions]:
    """Of every tenant that has one, by name."""
    place = Window(RowNumber(), partition_by=F("tenant"), order_by=F("version").desc())
    rows = GraphVersion.objects.defer("content").annotate(place=place).filter(place__lte=SHOWN)
    by_tenant: dict[str, list[GraphVersion]] = {}
    for row in rows.order_by("tenant", "-version"):
        by_tenant.setdefault(row.tenant, []).append(row)
    found = []
    for tenant, versions in by_tenant.items():
        passed = next((row for row in versions if not row.refused), None)
        old = passed is not None and (now - passed.trained_at).total_seconds() > MOST_AGE_S
        found.append(TenantVersions(tenant, versions, None if old else passed))
    return found
