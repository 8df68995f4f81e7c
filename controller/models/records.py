"""Finished requests (one partition a day) and their roll-up by minute.

PostgreSQL needs the partition key in the primary key, so the SQL of the migration makes it (arrived_at, id). For Django
the key is `id` alone, because the admin and foreign keys do not support composite keys.
"""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Coalesce, Least

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
    target_thinking_s = models.FloatField(null=True)
    first_answer_s = models.FloatField(null=True)
    reasoning_tokens = models.IntegerField(default=0, db_default=0)
    step_key = models.CharField(max_length=120, blank=True, default="", db_default="")
    parents = models.JSONField(null=True)
    tool_steps = models.JSONField(default=list, db_default=[])
    refined_bounds = models.JSONField(null=True)

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
        verbose_name = "attainment by minute"
        verbose_name_plural = "attainment by minute"
        ordering = ["-minute", "tenant", "slo_class", "model"]
        constraints = [
            # The index covers the counts, so that sums over a day do not read the rows with their histograms.
            models.UniqueConstraint(
                fields=["minute", "tenant", "slo_class", "model"], include=COUNTED, name="attainment_minute_unique"
            )
        ]

    def __str__(self) -> str:
        return f"{self.minute} {self.tenant} {self.slo_class}"


GOODPUT_COUNTED = ("finished", "in_time", "cancelled", "tokens", "goodput_tokens")


class GoodputMinute(models.Model):
    """Goodput of the requests that arrived in one minute, by type; those of workflows are in `WorkflowResult`.

    `finished` includes misses and excludes cancelled requests. `tokens`: of answers; of deadline requests those of
    their prompts as well. `goodput_tokens`: those of them that were in time.
    """

    minute = models.DateTimeField()
    tenant = models.CharField(max_length=64)
    slo_class = models.CharField(max_length=64, blank=True)
    type = models.CharField(max_length=16)
    finished = models.PositiveIntegerField()
    in_time = models.PositiveIntegerField()
    cancelled = models.PositiveIntegerField()
    tokens = models.BigIntegerField()
    goodput_tokens = models.BigIntegerField()

    class Meta:
        db_table = "goodput_minute"
        verbose_name = "goodput by minute"
        verbose_name_plural = "goodput by minute"
        ordering = ["-minute", "tenant", "slo_class", "type"]
        constraints = [
            models.UniqueConstraint(
                fields=["minute", "tenant", "slo_class", "type"],
                include=GOODPUT_COUNTED,
                name="goodput_minute_unique",
            )
        ]

    def __str__(self) -> str:
        return f"{self.minute} {self.tenant} {self.slo_class} {self.type}"


_BY_NOBODY = Q(cancelled_by="")
_TOO_LATE = Q(cancelled_at__gte=F("due_at"))  # it had its result
_IN_TIME = (_BY_NOBODY | _TOO_LATE) & (
    Q(due_at__isnull=True, missed=0, cancelled__lt=F("requests")) | Q(failed=0, ended_at__lte=F("due_at"))
)
_CANCELLED = Q(cancelled_by="tenant") | _BY_NOBODY & Q(due_at__isnull=True, cancelled=F("requests"))


class WorkflowResult(models.Model):
    """What the requests of one workflow add up to. Written with their records, so it is exact at any time.

    `due_at`: null without a deadline. `failed`: requests that were not answered, for whatever reason; `missed`: that
    did not attain their own targets, without cancelled ones. `tokens`: of prompts and answers. `cancelled_by`: tenant,
    operator or empty; at `cancelled_at`, which rows of releases before it lack. Cancelled before its first request it
    has 0 `requests`, and cancelled at or after `due_at` the result that it had then. `ends_at`: when it is due or was
    cancelled; without a deadline the end of its last request so far; it counts as goodput from then on. `in_time`: each
    request was answered, and the last by `due_at`; without a deadline each attained its own targets. `excluded`:
    cancelled by its client, so no miss. `latest`: false if the name was used again later.
    """

    tenant = models.CharField(max_length=64)
    workflow = models.CharField(max_length=120)
    slo_class = models.CharField(max_length=64, blank=True)
    began_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    due_at = models.DateTimeField(null=True)
    requests = models.PositiveIntegerField()
    failed = models.PositiveIntegerField()
    missed = models.PositiveIntegerField()
    cancelled = models.PositiveIntegerField()
    tokens = models.BigIntegerField()
    cancelled_by = models.CharField(max_length=16, blank=True)
    cancelled_at = models.DateTimeField(null=True)
    latest = models.BooleanField(default=True, db_default=True)
    ends_at = models.GeneratedField(
        expression=Case(
            When(_BY_NOBODY, then=Coalesce("due_at", "ended_at")),
            default=Least("due_at", Coalesce("cancelled_at", "ended_at")),
        ),
        output_field=models.DateTimeField(),
        db_persist=True,
    )
    in_time = models.GeneratedField(
        expression=Case(When(_IN_TIME, then=Value(True)), default=Value(False)),
        output_field=models.BooleanField(),
        db_persist=True,
    )
    excluded = models.GeneratedField(
        expression=Case(When(_TOO_LATE, then=Value(False)), When(_CANCELLED, then=Value(True)), default=Value(False)),
        output_field=models.BooleanField(),
        db_persist=True,
    )

    class Meta:
        db_table = "workflow_result"
        ordering = ["-ends_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "workflow"], condition=Q(latest=True), name="workflow_result_latest"
            )
        ]
        indexes = [
            # It covers what goodput sums, so that a day of workflows is read without their rows.
            models.Index(
                fields=["ends_at"],
                include=["tenant", "slo_class", "in_time", "excluded", "tokens"],
                name="workflow_result_ends",
            ),
            # Late records look for the row of a workflow that lost its name.
            models.Index(fields=["tenant", "workflow"], condition=Q(latest=False), name="workflow_result_left"),
        ]

    def __str__(self) -> str:
        return f"{self.tenant} {self.workflow}"

    @property
    def late_s(self) -> float | None:
        """By how much its last request ended after the deadline; negative: before it. None without a deadline."""
        return None if self.due_at is None else (self.ended_at - self.due_at).total_seconds()

    @property
    def given_up_by(self) -> str:
        """`cancelled_by`, if that was before it was due."""
        late = self.due_at is not None and self.cancelled_at is not None and self.cancelled_at >= self.due_at
        return "" if late else self.cancelled_by
