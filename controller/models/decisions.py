"""The audit log (append-only)."""

from __future__ import annotations

from django.db import models
from django.db.models import Q


class Decision(models.Model):
    """A decision in the audit: the stored form of `core.decisions.Decision`, or a change by a person. A trigger rejects
    UPDATE and DELETE.

    `subject_type` and `subject` name the row it is about ("slo_class", "interactive"). `reason` is a code. `inputs` are
    the figures (of a person's change: `before` and `after`), `rejected` the alternatives with the reason against each.
    """

    class ActorType(models.TextChoices):
        PERSON = "person", "Person"
        JOB = "job", "Job"
        GATEWAY = "gateway", "Gateway"
        SYSTEM = "system", "System"
        SERVICE = "service", "Service account"

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
    is_new = True  # not a column; False if a decision with the same idempotency key was found

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
                condition=Q(actor_type__in=["person", "job", "gateway", "system", "service"]),
                name="decision_actor_known",
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}"
