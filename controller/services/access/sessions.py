"""Ends sessions of people and clears those that have ended by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db import transaction
from django.utils import timezone

from controller.models import PersonSession
from controller.services.actors import Actor
from controller.services.decisions import decision_record


def sessions_end(*, actor: Actor, digests: Sequence[str]) -> list[str]:
    """End these sessions; returns the digests of those that were still open. One decision for each person."""
    with transaction.atomic():
        rows = list(
            PersonSession.objects.select_for_update(of=("self",)).select_related("person").filter(digest__in=digests)
        )
        ended: dict[str, list[PersonSession]] = {}
        for row in rows:
            ended.setdefault(row.person.get_username() if row.person else "", []).append(row)
        for person, theirs in ended.items():
            decision_record(
                actor=actor,
                kind="sessions_ended",
                subject_type="person",
                subject=person or "(nobody signed in)",
                reason="person_asked",
                inputs={"addresses": sorted({row.address for row in theirs})},
                outcome={"sessions": len(theirs)},
            )
        PersonSession.objects.filter(digest__in=[row.digest for row in rows]).delete()
    return [row.digest for row in rows]


def sessions_clear(*, now: datetime | None = None) -> int:
    """Delete the sessions that ended; returns their number."""
    gone, _ = PersonSession.objects.filter(expire_date__lte=now or timezone.now()).delete()
    return gone
