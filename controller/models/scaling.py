"""How many instances a model may have, and the state of the scaler between two ticks (HyperFlexis Alg. 3)."""

from __future__ import annotations

from datetime import datetime

from django.db import models
from django.db.models import F, Q

from controller.models.base import Versioned
from controller.models.fleet import Role, ServedModel


class ScalingPolicy(Versioned):
    """Thresholds are compared with the load, where 1.0 means that the fleet is exactly full. Times in seconds."""

    model = models.ForeignKey(ServedModel, on_delete=models.CASCADE, related_name="scaling_policies")
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.COLLOCATED)
    min_instances = models.PositiveIntegerField(default=1)
    max_instances = models.PositiveIntegerField(default=4)
    upper = models.FloatField("scale out above", default=0.8)
    lower = models.FloatField("scale in below", default=0.3)
    sustain_s = models.FloatField("scale in after", default=15.0)
    cooldown_s = models.FloatField("cooldown", default=10.0)
    interval_s = models.FloatField("evaluation interval", default=1.0)
    warm = models.PositiveIntegerField("warm instances", null=True, blank=True)  # null: as devices allow
    sleep_level = models.PositiveSmallIntegerField("scale-in sleep level", default=0, db_default=0)  # 0: stop instead
    enabled = models.BooleanField(default=True)
    # By hand: exactly so many instances until then, whatever the load is, and why. Null and "": by load.
    held_instances = models.PositiveIntegerField("manual instance count", null=True, blank=True)
    held_until = models.DateTimeField("manual until", null=True, blank=True)
    held_for = models.CharField("reason", max_length=200, blank=True, default="", db_default="")

    class Meta:
        db_table = "scaling_policy"
        verbose_name_plural = "scaling policies"
        ordering = ["model_id", "role"]
        constraints = [
            models.UniqueConstraint(fields=["model", "role"], name="scaling_policy_unique"),
            models.CheckConstraint(condition=Q(max_instances__gte=F("min_instances")), name="scaling_policy_bounds"),
            models.CheckConstraint(
                condition=Q(lower__gte=0) & Q(upper__gt=F("lower")),
                name="scaling_policy_thresholds",
            ),
            models.CheckConstraint(
                condition=Q(sustain_s__gte=0) & Q(cooldown_s__gte=0) & Q(interval_s__gt=0),
                name="scaling_policy_times",
            ),
            models.CheckConstraint(condition=Q(sleep_level__in=[0, 1, 2]), name="scaling_policy_sleep_level"),
            models.CheckConstraint(
                condition=Q(held_instances__isnull=True, held_until__isnull=True, held_for="")
                | Q(held_instances__gte=1, held_until__isnull=False) & ~Q(held_for=""),
                name="scaling_policy_held",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model.name} {self.role}: {self.min_instances} to {self.max_instances}"

    def held(self, now: datetime) -> int | None:
        """How many instances an operator holds the fleet at; None: the scaler goes by load."""
        return self.held_instances if self.held_until is not None and now < self.held_until else None

    def bounds(self, now: datetime) -> tuple[int, int]:
        """The least and the most instances now."""
        held = self.held(now)
        return (self.min_instances, self.max_instances) if held is None else (held, held)


class ScalerState(models.Model):
    """`scale.ScalerState` as JSON, which the scaler needs at its next tick, since a task has no memory. Stored with its
    Decision."""

    policy = models.OneToOneField(ScalingPolicy, on_delete=models.CASCADE, primary_key=True, related_name="state")
    state = models.JSONField(default=dict)
    tick = models.BigIntegerField(default=0)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        db_table = "scaler_state"

    def __str__(self) -> str:
        return f"tick {self.tick} of policy {self.policy_id}"


class ScalingSample(models.Model):
    """What the scaler saw every few seconds: the line behind its decisions. Deleted after some days."""

    policy = models.ForeignKey(ScalingPolicy, on_delete=models.CASCADE, related_name="samples")
    at = models.DateTimeField()
    load = models.FloatField(null=True)  # null: stale telemetry, or requests arrive while none is served
    ready = models.PositiveIntegerField()
    starting = models.PositiveIntegerField()
    draining = models.PositiveIntegerField()
    mind = models.CharField(max_length=32)  # of the scaler: "steady", or why it does not act although it would
    low_for_s = models.FloatField(default=0.0)
    cooldown_left_s = models.FloatField(default=0.0)
    start_s = models.FloatField(null=True)  # what a new instance was expected to take; null: not known

    class Meta:
        db_table = "scaling_sample"
        ordering = ["-at"]
        indexes = [models.Index(fields=["policy", "at"], name="scaling_sample_policy")]

    def __str__(self) -> str:
        return f"{self.policy_id} at {self.at}: load {self.load}"
