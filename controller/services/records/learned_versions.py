"""Stores versions of what is learned from records (length forests, pattern graphs). Only their trainers write them, one
at a time."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

from django.db import models, transaction
from django.utils import timezone

from controller.services.records.takeovers import takeovers_drop

CONTENTS_KEPT = 3  # versions of an owner whose content is kept
VERSIONS_KEPT = 100

Row = TypeVar("Row", bound=models.Model)


@transaction.atomic
def learned_version_store(model: type[Row], owner: dict[str, str], content: bytes | None, **figures: Any) -> Row:
    """Publish the next version of its owner (a field and its value), or without `content` record that it was refused.
    Older contents, and what gateways did with the oldest versions, are dropped in the same transaction."""
    mine = model._default_manager.filter(**owner)
    version = (mine.order_by("-version").values_list("version", flat=True).first() or 0) + 1
    digest = hashlib.sha256(content).hexdigest() if content is not None else ""
    row = model._default_manager.create(
        **owner, version=version, trained_at=timezone.now(), digest=digest, content=content, **figures
    )
    kept = list(
        mine.filter(content__isnull=False).order_by("-version").values_list("version", flat=True)[:CONTENTS_KEPT]
    )
    mine.filter(content__isnull=False).exclude(version__in=kept).update(content=None)
    oldest, (subject,) = version - VERSIONS_KEPT, owner.values()
    mine.filter(version__lte=oldest).exclude(version__in=kept).delete()
    takeovers_drop(version_of=model, subject=subject, oldest=oldest, kept=kept)
    return row
