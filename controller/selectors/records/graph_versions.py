"""Versions of pattern graphs: which are published, and the newest of each tenant for the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from controller.core.errors import ConfigError
from controller.models import GraphVersion, RequestRecord
from controller.predict.answer_lengths import MOST_AGE_S, PublishedVersion
from controller.predict.pattern_graphs import GraphSet, kind_of, kind_of_tool
from controller.selectors.records.learned_versions import content_of, newest_in_force, newest_rows, published

SHOWN = 5  # versions of a tenant, beside the newest that passed
NAMED_SINCE, MOST_NAMED = timedelta(days=1), 5_000  # requests whose stages name the kinds of calls


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


def graphs_in_use(tenant: str, now: datetime) -> tuple[GraphVersion, GraphSet] | None:
    """The version in force with its graphs; None without one that can be read."""
    row = GraphVersion.objects.filter(tenant=tenant, content__isnull=False).order_by("-version").first()
    if row is None or row.content is None or (now - row.trained_at).total_seconds() > MOST_AGE_S:
        return None
    try:
        return row, GraphSet.from_bytes(bytes(row.content))
    except ConfigError:  # damaged or of another release: gateways refuse it too
        return None


def kind_names(tenant: str, now: datetime) -> dict[int, str]:
    """What the kinds of calls are called, from the tenant's newest requests of workflows: graphs have numbers alone."""
    rows = RequestRecord.objects.filter(tenant=tenant, arrived_at__gt=now - NAMED_SINCE).exclude(workflow="")
    read = rows.order_by("-arrived_at").values_list("model", "stage", "tool_steps")[:MOST_NAMED]
    found: dict[int, str] = {}
    for model, stage, tools in read:
        found.setdefault(kind_of(model, stage), f"{stage or 'no stage'} ({model})")
        for tool in tools:
            name = str(tool.get("name", ""))
            found.setdefault(kind_of_tool(name), f"tool {name}")
    return found


def tenant_versions(now: datetime) -> list[TenantVersions]:
    """Of every tenant that has one, by name."""
    by_tenant: dict[str, list[GraphVersion]] = {}
    for row in newest_rows(GraphVersion.objects.all(), "tenant", SHOWN):
        by_tenant.setdefault(row.tenant, []).append(row)
    return [TenantVersions(tenant, rows, newest_in_force(rows, now)) for tenant, rows in by_tenant.items()]
