"""Open sessions of people."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import QuerySet

from controller.models import PersonSession


def open_sessions(now: datetime, of: Any = None) -> QuerySet[PersonSession]:
    """Newest use first, with the person. `of`: of this person alone."""
    rows = PersonSession.objects.filter(expire_date__gt=now, person__isnull=False).select_related("person")
    return rows if of is None else rows.filter(person=of)
