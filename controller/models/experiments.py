"""Experiments: their configuration, each of their runs, and registered traces."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q

from controller.models.base import NAME, Versioned


class Trace(models.Model):
    """A registered request trace, which the simulator reads as a workload: CSV, compressed, with the columns of
    `controller.services.experiments.traces`. It never changes."""

    slug = models.CharField(max_length=80, unique=True, validators=[NAME])
    name = models.CharField(max_length=120)
    requests = models.PositiveIntegerField()
    span_s = models.FloatField("first to last arrival, seconds")
    input_tokens_mean = models.FloatField()
    output_tokens_mean = models.FloatField()
    content = models.BinaryField("gzip of the CSV")
    created_by = models.CharField(max_length=150)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        db_table = "trace"
        ordering = ["-created_at", "-id"]
        constraints = [
            models.CheckConstraint(condition=Q(requests__gt=0), name="trace_not_empty"),
            models.CheckConstraint(condition=Q(span_s__gte=0), name="trace_span_not_negative"),
        ]

    def __str__(self) -> str:
        return self.slug


class Experiment(Versioned):
    """One comparison. `spec` is the simulator's JSON with fleets and profiles resolved, so that it can be run again.

    A worker holds it by `lease_token` until `lease_until`; a write without the token changes nothing. `progress`: share
    from 0 to 1; `spent_s`: wall seconds over all attempts; `notes`: what was sampled or estimated.
    """

    class Kind(models.TextChoices):
        EXPERIMENT = "experiment", "Experiment"
        PREVIEW = "preview", "Preview"

    class State(models.TextChoices):
        QUEUED = "queued", "Queued"
        RUNNING = "running", "Running"
        DONE = "done", "Done"
        FAILED = "failed", "Failed"
        CANCELLED = "cancelled", "Cancelled"

    OPEN = (State.QUEUED, State.RUNNING)

    slug = models.CharField(max_length=80, unique=True, validators=[NAME])
    name = models.CharField(max_length=120)
    kind = models.CharField(max_length=16, choices=Kind.choices, default=Kind.EXPERIMENT)
    spec = models.JSONField()
    state = models.CharField(max_length=16, choices=State.choices, default=State.QUEUED)
    progress = models.FloatField(default=0.0)
    step = models.CharField("current step", max_length=200, blank=True)
    knee = models.FloatField("requests/s of which rates are multiples", null=True, blank=True)
    result = models.JSONField(null=True, blank=True)
    error = models.TextField(blank=True)
    error_field = models.CharField(max_length=120, blank=True)
    notes = models.JSONField(default=list, blank=True)
    kept = models.BooleanField(default=False)
    attempts = models.PositiveIntegerField(default=0)
    spent_s = models.FloatField(default=0.0)
    lease_token = models.CharField(max_length=32, blank=True)
    lease_until = models.DateTimeField(null=True, blank=True)
    created_by = models.CharField(max_length=150)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        db_table = "experiment"
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index(
                fields=["kind", "created_at"], name="experiment_open", condition=Q(state__in=["queued", "running"])
            ),
            models.Index(fields=["-created_at", "-id"], name="experiment_newest"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=["queued", "running", "done", "failed", "cancelled"]),
                name="experiment_state_known",
            ),
            models.CheckConstraint(condition=Q(progress__gte=0, progress__lte=1), name="experiment_progress_is_share"),
            models.CheckConstraint(
                condition=~Q(state="done") | Q(result__isnull=False), name="experiment_done_has_result"
            ),
        ]

    def __str__(self) -> str:
        return self.slug

    @property
    def seeds(self) -> list[int]:
        return list(self.spec.get("seeds", [1]))

    @property
    def labels(self) -> list[str]:
        """Labels of the compared policies, in the configured order."""
        return [label_of(each) for each in self.spec.get("policies", [])]


class ExperimentRun(models.Model):
    """One policy at one rate with one seed. `report` is set when it ends; such a run is not repeated."""

    experiment = models.ForeignKey(Experiment, on_delete=models.CASCADE, related_name="runs")
    number = models.PositiveSmallIntegerField()
    variant = models.PositiveSmallIntegerField("index of the policy")
    label = models.CharField(max_length=120)
    rate = models.FloatField("requests/s", null=True)
    seed = models.BigIntegerField()
    report = models.JSONField(null=True)
    seconds = models.FloatField("wall time of the run", null=True)

    class Meta:
        db_table = "experiment_run"
        ordering = ["experiment_id", "number"]
        constraints = [models.UniqueConstraint(fields=["experiment", "number"], name="experiment_run_unique")]

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"


def label_of(policy: Any) -> str:
    """The label of an entry of a spec's `policies`, else the name of its policy set."""
    if isinstance(policy, str):
        return policy
    return str(policy.get("label") or policy.get("name") or "")
