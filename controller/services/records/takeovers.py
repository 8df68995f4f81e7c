"""Stores what gateways did with published versions (length forests, pattern graphs)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from django.db import models, transaction
from django.db.models import F

from controller.core.messages import GRAPHS, LENGTHS
from controller.models import GraphVersion, LearnedTakeover, LengthVersion
from controller.predict.answer_lengths import VersionOutcome

WHAT: dict[type[models.Model], str] = {LengthVersion: LENGTHS, GraphVersion: GRAPHS}


@transaction.atomic
def takeovers_write(*, gateway: str, what: str, outcomes: Sequence[VersionOutcome]) -> None:
    """Store a gateway's outcomes. One that is written twice, since an acknowledgement was lost, counts once."""
    for each in outcomes:
        at = datetime.fromtimestamp(each.at, UTC)
        row, created = LearnedTakeover.objects.get_or_create(
            what=what,
            subject=_fitting("subject", each.subject),
            version=each.version,
            gateway=_fitting("gateway", gateway),
            problem=_fitting("problem", each.problem),
            defaults={"first_at": at, "last_at": at},
        )
        if not created:
            LearnedTakeover.objects.filter(pk=row.pk, last_at__lt=at).update(last_at=at, times=F("times") + 1)


def takeovers_drop(*, version_of: type[models.Model], subject: str, oldest: int, kept: Sequence[int]) -> None:
    """Forget those of versions up to `oldest`, except of the `kept` ones."""
    rows = LearnedTakeover.objects.filter(what=WHAT[version_of], subject=subject, version__lte=oldest)
    rows.exclude(version__in=kept).delete()


def _fitting(name: str, text: str) -> str:
    field = LearnedTakeover._meta.get_field(name)
    assert isinstance(field, models.CharField)
    return text.replace("\x00", "")[: field.max_length]
