"""Which versions of what is learned from records (length forests, pattern graphs) are published and shown."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TypeVar, cast

from django.db import models
from django.db.models import F, Q, QuerySet, Window
from django.db.models.functions import RowNumber

from controller.models import GraphVersion, LengthVersion
from controller.predict.answer_lengths import MOST_AGE_S, PublishedVersion

Row = TypeVar("Row", bound=models.Model)
Learned = TypeVar("Learned", LengthVersion, GraphVersion)


def published(model: type[models.Model], owner: str) -> list[PublishedVersion]:
    """The newest with content of each owner. `owner`: the field that names it."""
    rows = model._default_manager.filter(content__isnull=False).order_by(owner, "-version").distinct(owner)
    found = rows.values_list(owner, "version", "trained_at", "digest")
    return [PublishedVersion(name, version, at.timestamp(), digest) for name, version, at, digest in found]


def content_of(model: type[models.Model], /, **version: str | int) -> bytes | None:
    """Of one version; None: it has none any more."""
    row = model._default_manager.filter(**version).values_list("content", flat=True).first()
    return None if row is None else bytes(row)


def newest_in_force(rows: Sequence[Learned], now: datetime) -> Learned | None:
    """Of the versions of an owner, newest first: the newest that passed, unless it is too old."""
    newest = next((row for row in rows if not row.refused), None)
    return None if newest is None or (now - newest.trained_at).total_seconds() > MOST_AGE_S else newest


def all_rows(model: type[Row], /, **owner: str) -> QuerySet[Row]:
    """The stored versions of an owner without contents, newest first. `owner`: the field that names it."""
    return model._default_manager.filter(**owner).defer("content").order_by("-version")


def newest_rows(rows: QuerySet[Row], owner: str, most: int) -> QuerySet[Row]:
    """The `most` newest versions of each owner and the newest that passed, which stays in use however many were refused
    after it; without contents, newest first."""
    newest_first = F("version").desc()
    place = Window(RowNumber(), partition_by=F(owner), order_by=newest_first)
    of_result = Window(RowNumber(), partition_by=[F(owner), F("refused")], order_by=newest_first)
    found = rows.defer("content").annotate(place=place, of_result=of_result)
    shown = found.filter(Q(place__lte=most) | Q(refused="", of_result=1))
    return cast("QuerySet[Row]", shown.order_by(owner, "-version"))
