"""Which versions of what is learned from records (length forests, pattern graphs) are published."""

from __future__ import annotations

from django.db import models

from controller.predict.answer_lengths import PublishedVersion


def published(model: type[models.Model], owner: str) -> list[PublishedVersion]:
    """The newest with content of each owner. `owner`: the field that names it."""
    rows = model._default_manager.filter(content__isnull=False).order_by(owner, "-version").distinct(owner)
    found = rows.values_list(owner, "version", "trained_at", "digest")
    return [PublishedVersion(name, version, at.timestamp(), digest) for name, version, at, digest in found]


def content_of(model: type[models.Model], /, **version: str | int) -> bytes | None:
    """Of one version; None: it has none any more."""
    row = model._default_manager.filter(**version).values_list("content", flat=True).first()
    return None if row is None else bytes(row)
