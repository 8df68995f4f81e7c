"""Actions on instances that take longer than one request; the Celery queue `actions` only announces them."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from controller.models.decisions import Decision
from controller.models.fleet import Instance, Link


class Action(models.Model):
    """One order. A worker holds it until `lease_until` while it works on it; any worker may take an expired lease.

    `params`: the order (`sources`, if its caller chose them; `plan`, the chosen ones). `tries`: how often it was sent
    to the engine. `attempts`: what was tried (source, seconds, bytes, error). `decision`: the Decision at its end.
    """

    class Kind(models.TextChoices):
        WEIGHTS_LOAD = "weights_load", "Load weights"
        FIRST_SERVED = "first_served", "Wait for the first served request"
        SLEEP = "sleep", "Fall asleep"
        WAKE = "wake", "Wake up"
        ROLE_SWITCH = "role_switch", "Switch role"

    class State(models.TextChoices):
        QUEUED = "queued", "Queued"
        RUNNING = "running", "Running"
        DONE = "done", "Done"
        FAILED = "failed", "Failed"

    OPEN = (State.QUEUED, State.RUNNING)

    kind = models.CharField(max_length=32, choices=Kind.choices)
    instance = models.ForeignKey(Instance, on_delete=models.CASCADE, related_name="actions")
    params = models.JSONField(default=dict)
    state = models.CharField(max_length=16, choices=State.choices, default=State.QUEUED)
    lease_until = models.DateTimeField(null=True)
    tries = models.PositiveSmallIntegerField(default=0)
    attempts = models.JSONField(default=list)
    error = models.TextField(blank=True)
    actor_type = models.CharField(max_length=16, choices=Decision.ActorType.choices)
    actor = models.CharField(max_length=150)
    decision = models.ForeignKey(Decision, null=True, on_delete=models.SET_NULL, related_name="actions")
    created_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "action"
        ordering = ["-id"]
        indexes = [
            models.Index(
                fields=["state", "lease_until"],
                name="action_open",
                condition=Q(state__in=["queued", "running"]),
            ),
            models.Index(fields=["instance", "created_at"], name="action_instance"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["instance", "kind"],
                condition=Q(state__in=["queued", "running"]),
                name="action_one_open",
            ),
            models.CheckConstraint(
                condition=Q(kind__in=["weights_load", "first_served", "sleep", "wake", "role_switch"]),
                name="action_kind_known",
            ),
            models.CheckConstraint(
                condition=Q(state__in=["queued", "running", "done", "failed"]), name="action_state_known"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} of {self.instance_id}"


class Transfer(models.Model):
    """One attempt of a weight load: source, link, bytes, seconds, and the error if it failed.

    With flow scheduling `flow` is `scheduled`, or why it was not; otherwise it is empty. `held_s`: of `seconds`, while
    the source might not send. `flow_level`: its last level, 1 the most urgent, 0 unknown.

    `source`: the engine that gave the weights; "" if they did not come from an engine's memory. KV transfers have
    their own table (`KvTransfer`).
    """

    class State(models.TextChoices):
        DONE = "done", "Done"
        FAILED = "failed", "Failed"

    action = models.ForeignKey(Action, on_delete=models.CASCADE, related_name="transfers")
    source_kind = models.CharField(max_length=16)  # engine | host | disk
    source = models.CharField(max_length=64, blank=True)
    target = models.CharField(max_length=64)
    link = models.ForeignKey(Link, null=True, on_delete=models.SET_NULL, related_name="transfers")
    attempt = models.PositiveSmallIntegerField()
    bytes = models.BigIntegerField()
    seconds = models.FloatField()
    flow = models.CharField(max_length=40, blank=True, default="", db_default="")
    held_s = models.FloatField(default=0.0, db_default=0.0)
    flow_level = models.PositiveSmallIntegerField(default=0, db_default=0)
    state = models.CharField(max_length=8, choices=State.choices)
    error = models.TextField(blank=True)
    recorded_at = models.DateTimeField()

    class Meta:
        db_table = "transfer"
        verbose_name = "weight transfer"
        verbose_name_plural = "weight transfers"
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["target", "recorded_at"], name="transfer_target"),
            models.Index(fields=["link", "recorded_at"], name="transfer_link"),
        ]
        constraints = [
            models.UniqueConstraint(fields=["action", "attempt"], name="transfer_attempt_once"),
            models.CheckConstraint(condition=Q(bytes__gte=0) & Q(seconds__gte=0), name="transfer_not_negative"),
            models.CheckConstraint(condition=Q(state__in=["done", "failed"]), name="transfer_state_known"),
        ]

    def __str__(self) -> str:
        return f"{self.source or self.source_kind} to {self.target}"

    @property
    def bytes_s(self) -> float | None:
        """Bytes/s while it was not held; None if nothing was transferred."""
        moving_s = self.seconds - self.held_s
        return self.bytes / moving_s if self.bytes and moving_s > 0 else None
