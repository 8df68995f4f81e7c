"""Stores versions of length forests. Only the trainer writes them, one at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction
from django.utils import timezone

from controller.models import LengthVersion
from controller.predict.length_forest import LengthForest

CONTENTS_KEPT = 3  # versions of a model whose forest is kept
VERSIONS_KEPT = 100


@dataclass(frozen=True, slots=True)
class JudgedForest:
    """What `LengthVersion` says of it, with its forest. `refused`: why it must not be in force; "": it may be."""

    model: str
    forest: LengthForest
    first_at: datetime
    last_at: datetime
    answers: int
    cut_answers: int
    judged: int
    coverage: float
    class_coverage: float
    pinball: float
    class_pinball: float
    refused: str


@transaction.atomic
def length_version_store(judged: JudgedForest) -> LengthVersion:
    """Publish a version, or record that it was refused. Older forests are dropped in the same transaction."""
    mine = LengthVersion.objects.filter(model=judged.model)
    last = mine.order_by("-version").values_list("version", flat=True).first() or 0
    content = None if judged.refused else judged.forest.to_bytes()
    figures = {name: getattr(judged, name) for name in JudgedForest.__slots__ if name not in ("model", "forest")}
    row = LengthVersion.objects.create(
        model=judged.model,
        version=last + 1,
        trained_at=timezone.now(),
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
