"""Links between instances, current and past, and every KV transfer over them."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from controller.core.kv_links import LinkState
from controller.dispatch.lifecycle import TRANSFER_STATES
from controller.models.fleet import Link

STATES = [(state.value, state.value.capitalize()) for state in LinkState]
OUTCOMES = ("done", "failed", "undone")
REACHED = tuple(state.value for state in TRANSFER_STATES)
OUTCOME_CHOICES = [(outcome, outcome.capitalize()) for outcome in OUTCOMES]
REACHED_CHOICES = [(state, state.capitalize()) for state in REACHED]


class InstanceLink(models.Model):
    """The connection over which `target` pulls KV from `source`, as its engine reports it (at most once a second).

    It has names instead of foreign keys, since it is history. `link`: the described link between their hosts, if any.
    Counts are since it was opened; `closed_at`: when either end had left, or the link was no longer needed.
    """

    source = models.CharField(max_length=64)
    target = models.CharField(max_length=64)
    model = models.CharField(max_length=120)
    link = models.ForeignKey(Link, null=True, on_delete=models.SET_NULL, related_name="instance_links")
    state = models.CharField(max_length=16, choices=STATES, default=LinkState.CONNECTING.value)
    since = models.DateTimeField()  # of this state
    bandwidth_bytes_s = models.FloatField(null=True)
    latency_s = models.FloatField(null=True)
    bytes = models.BigIntegerField(default=0)
    transfers = models.BigIntegerField(default=0)
    failures = models.BigIntegerField(default=0)
    last_error = models.TextField(blank=True)
    error_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField()
    observed_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "instance_link"
        ordering = ["source", "target", "-id"]
        indexes = [
            models.Index(fields=["target", "source"], name="instance_link_target"),
            models.Index(fields=["closed_at"], name="instance_link_closed", condition=Q(closed_at__isnull=False)),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["source", "target"], condition=Q(closed_at__isnull=True), name="instance_link_one_open"
            ),
            models.CheckConstraint(
                condition=Q(state__in=["connecting", "up", "degraded", "down"]), name="instance_link_state_known"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


class KvTransfer(models.Model):
    """One attempt to transfer a request's KV from its prefill to a decode instance. Stored with the request's record.

    `state`: the last of `REACHED` that it reached. `outcome`: `done`, `failed` (by an engine or the network), `undone`
    (rolled back by us, for the `reason`, such as a timeout). `seconds`: of the transfer alone if the decode engine
    measured it (`measured_by` "engine"), else from the placement to its end as the gateway saw it. `overlap_s`: how
    much of that the decode engine computed for others. Null: not measured. One partition a day, by `started_at`.

    With flow scheduling `flow` is `scheduled`, or why it was not; otherwise it is empty. `held_s`: of `seconds`, while
    the prefill engine might not send.
    """

    id = models.BigAutoField(primary_key=True)
    started_at = models.DateTimeField()
    request = models.CharField(max_length=64)
    attempt = models.PositiveSmallIntegerField()
    model = models.CharField(max_length=120)
    source = models.CharField(max_length=64)
    target = models.CharField(max_length=64)
    outcome = models.CharField(max_length=8, choices=OUTCOME_CHOICES)
    state = models.CharField(max_length=16, choices=REACHED_CHOICES)
    reason = models.CharField(max_length=64)
    error = models.TextField(blank=True)
    bytes = models.BigIntegerField(null=True)
    layers = models.IntegerField(null=True)
    tokens = models.IntegerField(null=True)
    cached = models.IntegerField(null=True)
    seconds = models.FloatField()
    overlap_s = models.FloatField(null=True)
    measured_by = models.CharField(max_length=8)
    held_s = models.FloatField(default=0.0, db_default=0.0)
    flow = models.CharField(max_length=40, blank=True, default="", db_default="")

    class Meta:
        db_table = "kv_transfer"
        verbose_name = "KV transfer"
        verbose_name_plural = "KV transfers"
        ordering = ["-started_at", "-id"]
        indexes = [
            models.Index(fields=["id"], name="kv_transfer_id"),  # since the table's primary key begins with the time
            models.Index(fields=["request"], name="kv_transfer_request"),
            models.Index(fields=["source", "started_at"], name="kv_transfer_source"),
            models.Index(fields=["target", "started_at"], name="kv_transfer_target"),
            models.Index(fields=["started_at"], name="kv_transfer_failed", condition=~Q(outcome="done")),
        ]

    def __str__(self) -> str:
        return f"{self.request} from {self.source} to {self.target}"

    @property
    def bytes_s(self) -> float | None:
        """Bytes/s, while it was not held, of a transfer that arrived and was measured."""
        measured, moving_s = self.outcome == "done" and self.measured_by == "engine", self.seconds - self.held_s
        return self.bytes / moving_s if measured and self.bytes and moving_s > 0 else None
