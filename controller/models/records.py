"""Finished requests (one partition a day) and their roll-up by minute.

PostgreSQL needs the partition key in the primary key, so the SQL of the migration makes it (arrived_at, id). For Django
the key is `id` alone, because the admin and foreign keys do not support composite keys.
"""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from controller.core.types import Outcome

OUTCOMES = [(outcome.value, outcome.value) for outcome in Outcome]


class RequestRecord(models.Model):
    """core.types.RequestRecord as stored, with columns in the order of RECORD_FIELDS. It has names instead of foreign
    keys, since it is history."""

    id = models.CharField(primary_key=True, max_length=64)
    arrived_at = models.DateTimeField()
    tenant = models.CharField(max_length=64)
    slo_class = models.CharField(max_length=64, blank=True)
    model = models.CharField(max_length=120)
    priority = models.IntegerField(null=True)
    instance = models.CharField(max_length=64, blank=True)
    outcome = models.CharField(max_length=16, choices=OUTCOMES)
    error_code = models.CharField(max_length=64, blank=True)
    http_status = models.IntegerField()
    streamed = models.BooleanField()
    judged_by = models.CharField(max_length=16)
    prompt_tokens = models.IntegerField()
    output_tokens = models.IntegerField()
    target_ttft_s = models.FloatField()
    target_tpot_s = models.FloatField()
    target_deadline_s = models.FloatField(null=True)
    waiting_time_s = models.FloatField(null=True)
    queue_s = models.FloatField(null=True)
    ttft_s = models.FloatField(null=True)
    tpot_s = models.FloatField(null=True)
    e2e_s = models.FloatField(null=True)
    ttft_met = models.BooleanField()
    tpot_met = models.BooleanField()
    deadline_met = models.BooleanField()
    attained = models.BooleanField()
    goodput_tokens = models.IntegerField()
    attempts = models.IntegerField()
    workflow = models.CharField(max_length=120, blank=True)
    stage = models.CharField(max_length=120, blank=True)
    decisions = models.JSONField(default=list)
    token_times = models.JSONField(default=list)
    prefill_instance = models.CharField(max_length=64, blank=True, default="", db_default="")
    may_defer = models.BooleanField(default=False, db_default=False)
    stands_for = models.IntegerField(default=1, db_default=1)
    last_arrived_at = models.DateTimeField(null=True)
    all_prompt_tokens = models.BigIntegerField(null=True)
    length_features = models.JSONField(default=list, db_default=[])
    length_bounds = models.JSONField(default=list, db_default=[])
    length_version = models.IntegerField(null=True)

    class Meta:
        db_table = "request_record"
        ordering = ["-arrived_at", "-id"]
        indexes = [
            models.Index(fields=["id"], name="request_record_id"),
            models.Index(fields=["tenant", "arrived_at"], name="request_record_tenant"),
            models.Index(fields=["slo_class", "arrived_at"], name="request_record_class"),
            models.Index(fields=["instance", "arrived_at"], name="request_record_instance"),
            models.Index(
                fields=["prefill_instance", "arrived_at"],
                name="request_record_prefill",
                condition=~Q(prefill_instance=""),
            ),
            models.Index(fields=["outcome", "arrived_at"], name="request_record_missed", condition=Q(attained=False)),
            models.Index(fields=["arrived_at"], name="request_record_workflow", condition=~Q(workflow="")),
        ]

    def __str__(self) -> str:
        return self.id


COUNTED = (
    "finished", "attained", "ttft_met", "tpot_met", "refused", "expired", "failed", "cancelled", "prompt_tokens",
    "output_tokens", "goodput_tokens",
)  # fmt: skip


class AttainmentMinute(models.Model):
    """Counts of the requests that arrived in one minute. `finished` includes misses and excludes cancelled requests.

    The histograms count TTFT, TPOT and E2E by the bounds of models.histogram, for quantiles over any number of minutes.
    """

    minute = models.DateTimeField()
    tenant = models.CharField(max_length=64)
    slo_class = models.CharField(max_length=64, blank=True)
    model = models.CharField(max_length=120)
    finished = models.PositiveIntegerField()
    attained = models.PositiveIntegerField()
    ttft_met = models.PositiveIntegerField()
    tpot_met = models.PositiveIntegerField()
    refused = models.PositiveIntegerField()
    expired = models.PositiveIntegerField()
    failed = models.PositiveIntegerField()
    cancelled = models.PositiveIntegerField()
    prompt_tokens = models.BigIntegerField()
    output_tokens = models.BigIntegerField()
    goodput_tokens = models.BigIntegerField()
    ttft_histogram = ArrayField(models.IntegerField())
    tpot_histogram = ArrayField(models.IntegerField())
    e2e_histogram = ArrayField(models.IntegerField())

    class Meta:
        db_table = "attainment_minute"
        ordering = ["-minute", "tenant", "slo_class", "model"]
        constraints = [
            # The index covers the counts, so that sums over a day do not read the rows with their histograms.
            models.UniqueConstraint(
                fields=["minute", "tenant", "slo_class", "model"], include=COUNTED, name="attainment_minute_unique"
            )
        ]

    def __str__(self) -> str:
        return f"{self.minute} {self.tenant} {self.slo_class}"
