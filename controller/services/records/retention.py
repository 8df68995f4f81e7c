"""Retention of actions and decisions. This is the only code that the database lets delete a decision."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import connection, transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.services.actors import Actor
from controller.services.decisions import decision_record

RETENTION = Actor.job("retention")
CHUNK = 5_000  # rows a transaction
KEPT = (Decision.ActorType.PERSON, Decision.ActorType.SERVICE)  # who acts for people: kept forever
SHORTEST_DAYS = 30  # of decisions: the trigger `decision_append_only` keeps younger ones


def actions_retain(*, days: int, now: datetime | None = None) -> int:
    """Delete actions that ended more than `days` days ago, with their transfers; returns their number.

    The newest of each kind stays while its instance should run, since it explains the state of the instance.
    """
    if days < 1:
        raise ValueError("days: at least 1")
    limit = (now or timezone.now()) - timedelta(days=days)
    newer = Action.objects.filter(instance=OuterRef("instance"), kind=OuterRef("kind"), pk__gt=OuterRef("pk"))
    old = Action.objects.filter(ended_at__lt=limit).filter(
        Q(Exists(newer)) | Q(instance__desired_state=Instance.Desired.STOPPED)
    )
    gone = 0
    while ids := list(old.order_by("pk").values_list("pk", flat=True)[:CHUNK]):
        Action.objects.filter(pk__in=ids).delete()
        gone += len(ids)
    return gone


def decisions_retain(*, days: int, now: datetime | None = None) -> int:
    """Delete decisions of jobs, gateways and the system that are more than `days` days old (0: none); returns their
    number.

    Decisions of people and of service accounts are kept forever. The deletion is itself a Decision, in the same
    transaction.
    """
    if days == 0:
        return 0
    if days < SHORTEST_DAYS:
        raise ValueError(f"days: at least {SHORTEST_DAYS}, or 0 forever")
    limit = (now or timezone.now()) - timedelta(days=days)
    old = Decision.objects.filter(at__lt=limit).exclude(actor_type__in=KEPT)
    gone = 0
    while ids := list(old.order_by("at", "pk").values_list("pk", flat=True)[:CHUNK]):
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL slackline.retention = 'on'")
            Decision.objects.filter(pk__in=ids).delete()
            decision_record(
                actor=RETENTION,
                kind="audit_trimmed",
                subject_type="audit",
                subject="decisions",
                reason="older_than_kept",
                inputs={"days": days, "before": limit.isoformat(timespec="seconds")},
                outcome={"gone": len(ids)},
            )
            gone += len(ids)
    return gone
