"""What is being done to instances over more than one moment: the truth behind the queue `actions`."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from controller.models.decisions import Decision
from controller.models.fleet import Instance, Link


class Action(models.Model):
    """One order. A worker holds it by `lease_until` while it looks; a lease that ran out is anybody's.

    `params`: what was ordered (`sources`, if its caller chose them; `plan`, what was chosen for it). `tries`: how often
    the engine was told. `attempts`: what was tried (source, seconds, bytes, error). `decision`: the one at its end.
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
    """One attempt to bring weights to an instance: from where, over which link, how much, how fast, why not.

    `source`: the engine they came from, "" where they did not come from an engine's memory. The KV of requests has
    rows of its own, in partitions (`KvTransfer`).
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
    state = models.CharField(max_length=8, choices=State.choices)
    error = models.TextField(blank=True)
    recorded_at = models.DateTimeField()

    class Meta:
        db_table = "transfer"
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
        """Bytes a second; None where nothing moved."""
        return self.bytes / self.seconds if self.bytes and self.seconds > 0 else None
