"""Versions of length forests: which are in force, and all of them for the console."""

from __future__ import annotations

from django.db.models import QuerySet

from controller.models import LengthVersion
from controller.predict.answer_lengths import PublishedVersion


def published_versions() -> list[PublishedVersion]:
    """The newest of each model that has content."""
    rows = LengthVersion.objects.filter(content__isnull=False).order_by("model", "-version").distinct("model")
    found = rows.values_list("model", "version", "trained_at", "digest")
    return [PublishedVersion(model, version, at.timestamp(), digest) for model, version, at, digest in found]


def published_content(model: str, version: int) -> bytes | None:
    """None: it has none any more."""
    row = LengthVersion.objects.filter(model=model, version=version).values_list("content", flat=True).first()
    return None if row is None else bytes(row)


def length_versions() -> QuerySet[LengthVersion]:
    """All, without their content."""
    return LengthVersion.objects.defer("content").order_by("model", "-version")
