"""The audit (append-only) and the actions that follow from it."""

from __future__ import annotations

from datetime import datetime

from django.db import models
from django.db.models import Q

from controller.models.fleet import Instance


class Decision(models.Model):
    """Who decided what, when, on which figures. A trigger refuses UPDATE and DELETE.

    `subject_type` and `subject` name the row it is about ("slo_class", "interactive"); `reason` is machine-readable;
    `inputs` are the figures (a person's change: `before` and `after`), `rejected` the alternatives and why not them.
    """

    class ActorType(models.TextChoices):
        PERSON = "person", "Person"
        JOB = "job", "Job"
        GATEWAY = "gateway", "Gateway"
        SYSTEM = "system", "System"

    at = models.DateTimeField()
    actor_type = models.CharField(max_length=16, choices=ActorType.choices)
    actor = models.CharField(max_length=150)
    kind = models.CharField(max_length=64)
    subject_type = models.CharField(max_length=32)
    subject = models.CharField(max_length=255)
    reason = models.CharField(max_length=255)
    inputs = models.JSONField(default=dict)
    outcome = models.JSONField(default=dict)
    rejected = models.JSONField(default=dict)
    request_id = models.CharField(max_length=64, blank=True)
    idempotency_key = models.CharField(max_length=200, null=True, unique=True)
    is_new = True  # not a column: False when a recorded decision was found under the same key

    class Meta:
        db_table = "decision"
        ordering = ["-at", "-id"]
        indexes = [
            models.Index(fields=["-at", "-id"], name="decision_newest"),
            models.Index(fields=["kind", "at"], name="decision_kind"),
            models.Index(fields=["actor", "at"], name="decision_actor"),
            models.Index(fields=["subject_type", "subject", "at"], name="decision_subject"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(actor_type__in=["person", "job", "gateway", "system"]), name="decision_actor_known"
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}"


class ActionQuerySet(models.QuerySet["Action"]):
    def open(self) -> ActionQuerySet:
        return self.filter(state__in=Action.OPEN)

    def claimable(self, now: datetime) -> ActionQuerySet:
        """Open, and held by nobody whose lease still runs."""
        return self.open().filter(Q(lease_until__isnull=True) | Q(lease_until__lt=now))


class Action(models.Model):
    """Something to be done to an instance: the truth behind the `actions` queue, which may forget.

    A task claims its row by a conditional update that sets `lease_until`; without a live lease it is given out again.
    """

    class State(models.TextChoices):
        PENDING = "pending", "Pending"
        RUNNING = "running", "Running"
        DONE = "done", "Done"
        FAILED = "failed", "Failed"

    OPEN = (State.PENDING, State.RUNNING)

    kind = models.CharField(max_length=32)
    instance = models.ForeignKey(Instance, null=True, blank=True, on_delete=models.CASCADE, related_name="actions")
    params = models.JSONField(default=dict, blank=True)
    state = models.CharField(max_length=16, choices=State.choices, default=State.PENDING)
    lease_until = models.DateTimeField(null=True, blank=True)
    lease_owner = models.CharField(max_length=120, blank=True)
    attempts = models.PositiveIntegerField(default=0)
    error = models.TextField(blank=True)
    decision = models.ForeignKey(Decision, null=True, blank=True, on_delete=models.PROTECT, related_name="actions")
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    objects = ActionQuerySet.as_manager()

    class Meta:
        db_table = "action"
        ordering = ["id"]
        indexes = [
            models.Index(
                fields=["state", "lease_until"], name="action_open", condition=Q(state__in=["pending", "running"])
            )
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=["pending", "running", "done", "failed"]), name="action_state_known"
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.instance_id or ''}".strip()
