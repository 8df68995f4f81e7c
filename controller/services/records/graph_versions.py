"""Stores versions of pattern graphs. Only the trainer writes them, one at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction
from django.utils import timezone

from controller.models import GraphVersion
from controller.predict.pattern_graphs import GraphSet

CONTENTS_KEPT = 3  # versions of a tenant whose graphs are kept
VERSIONS_KEPT = 100


@dataclass(frozen=True, slots=True)
class JudgedGraphs:
    """What `GraphVersion` says of them, with the graphs. `refused`: why they must not be in force; "": they may be."""

    tenant: str
    found: GraphSet
    first_at: datetime
    last_at: datetime
    workflows: int
    judged: int
    matched: float
    error: float
    even_error: float
    refused: str


@transaction.atomic
def graph_version_store(judged: JudgedGraphs) -> GraphVersion:
    """Publish a version, or record that it was refused. Older graphs are dropped in the same transaction."""
    mine = GraphVersion.objects.filter(tenant=judged.tenant)
    last = mine.order_by("-version").values_list("version", flat=True).first() or 0
    content = None if judged.refused else judged.found.to_bytes()
    figures = {name: getattr(judged, name) for name in JudgedGraphs.__slots__ if name not in ("tenant", "found")}
    row = GraphVersion.objects.create(
        tenant=judged.tenant,
        version=last + 1,
        trained_at=timezone.now(),
        graphs=len(judged.found),
        digest=hashlib.sha256(content).hexdigest() if content is not None else "",
        content=content,
        **figures,
    )
    kept = list(
        mine.filter(content__isnull=False).order_by("-version").values_list("version", flat=True)[:CONTENTS_KEPT]
    )
    mine.filter(content__isnull=False).exclude(version__in=kept).update(content=None)
    mine.filter(version__lte=row.version - VERSIONS_KEPT).exclude(version__in=kept).delete()
    return row
