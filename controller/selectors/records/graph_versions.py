"""Versions of pattern graphs: which are published."""

from __future__ import annotations

from controller.models import GraphVersion
from controller.predict.answer_lengths import PublishedVersion


def published_graphs() -> list[PublishedVersion]:
    """The newest of each tenant that has content."""
    rows = GraphVersion.objects.filter(content__isnull=False).order_by("tenant", "-version").distinct("tenant")
    found = rows.values_list("tenant", "version", "trained_at", "digest")
    return [PublishedVersion(tenant, version, at.timestamp(), digest) for tenant, version, at, digest in found]


def published_graph_content(tenant: str, version: int) -> bytes | None:
    """None: it has none any more."""
    row = GraphVersion.objects.filter(tenant=tenant, version=version).values_list("content", flat=True).first()
    return None if row is None else bytes(row)
