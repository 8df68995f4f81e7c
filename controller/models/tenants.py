"""Tenants, which send requests, and their API keys."""

from __future__ import annotations

import hashlib

from django.core.validators import MaxValueValidator
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from controller.models.base import NAME, Versioned, above_zero, positive
from controller.slo.stage_deadlines import LIVE_RULE, STAGE_DEADLINES

LOWEST_PRIORITY = 1000
LONGEST_RETENTION_S = 7 * 86_400
NO_NAMES = models.Value([], output_field=models.JSONField())


class TenantQuerySet(models.QuerySet["Tenant"]):
    def active(self) -> TenantQuerySet:
        return self.filter(state=Tenant.State.ACTIVE)


class Tenant(Versioned):
    """Records and decisions refer to `name`, so it never changes. Quotas: null means unlimited.

    Entitlements (`controller.slo.classes`): an empty list allows all names, null any target, and
    `highest_priority` 0 any priority. `queue_share` null: the gateway's setting.
    """

    class State(models.TextChoices):
        ACTIVE = "active", "Active"
        SUSPENDED = "suspended", "Suspended"

    name = models.CharField(max_length=64, unique=True, validators=[NAME])
    title = models.CharField(max_length=120, blank=True)
    default_class = models.ForeignKey(
        "controller.SLOClass", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    rpm = models.PositiveIntegerField("requests a minute", null=True, blank=True, validators=[above_zero])
    tpm = models.PositiveIntegerField("tokens a minute", null=True, blank=True, validators=[above_zero])
    max_concurrency = models.PositiveIntegerField(null=True, blank=True, validators=[above_zero])
    allowed_classes = models.JSONField(default=list, db_default=NO_NAMES, blank=True)
    allowed_models = models.JSONField(default=list, db_default=NO_NAMES, blank=True)
    highest_priority = models.PositiveSmallIntegerField(
        default=0, db_default=0, validators=[MaxValueValidator(LOWEST_PRIORITY)]
    )
    tightest_ttft_s = models.FloatField("tightest TTFT", null=True, blank=True, validators=[above_zero])
    tightest_tpot_s = models.FloatField("tightest TPOT", null=True, blank=True, validators=[above_zero])
    tightest_deadline_s = models.FloatField("tightest deadline", null=True, blank=True, validators=[above_zero])
    queue_share = models.FloatField(null=True, blank=True, validators=[above_zero, MaxValueValidator(1.0)])
    # Of answers of steps (`metadata.step_key`) and of responses. Text is stored of no tenant without it.
    retention_s = models.PositiveIntegerField(
        "retention of answers", default=0, db_default=0, validators=[MaxValueValidator(LONGEST_RETENTION_S)]
    )
    # How the deadline of its workflows is divided among their stages.
    stage_deadlines = models.CharField(
        "division of deadlines",
        max_length=16,
        choices=[(rule, rule) for rule in STAGE_DEADLINES],
        default=LIVE_RULE,
        db_default=LIVE_RULE,
    )
    state = models.CharField(max_length=16, choices=State.choices, default=State.ACTIVE)

    objects = TenantQuerySet.as_manager()

    class Meta:
        db_table = "tenant"
        ordering = ["name"]
        constraints = [
            positive("rpm", name="tenant_rpm_positive", optional=True),
            positive("tpm", name="tenant_tpm_positive", optional=True),
            positive("max_concurrency", name="tenant_max_concurrency_positive", optional=True),
            models.CheckConstraint(condition=Q(state__in=["active", "suspended"]), name="tenant_state_known"),
            positive("tightest_ttft_s", name="tenant_tightest_ttft_positive", optional=True),
            positive("tightest_tpot_s", name="tenant_tightest_tpot_positive", optional=True),
            positive("tightest_deadline_s", name="tenant_tightest_deadline_positive", optional=True),
            models.CheckConstraint(
                condition=Q(queue_share__isnull=True) | Q(queue_share__gt=0, queue_share__lte=1),
                name="tenant_queue_share_within_bounds",
            ),
            models.CheckConstraint(
                condition=Q(stage_deadlines__in=list(STAGE_DEADLINES)), name="tenant_stage_deadlines_known"
            ),
            models.CheckConstraint(
                condition=Q(retention_s__lte=LONGEST_RETENTION_S), name="tenant_retention_within_bounds"
            ),
        ]

    def __str__(self) -> str:
        return self.name


def secret_digest(secret: str) -> str:
    """What is stored of a key: 64 hex digits. A key is 32 random bytes, so a plain hash cannot be guessed back."""
    return hashlib.sha256(secret.encode()).hexdigest()


class ApiKeyQuerySet(models.QuerySet["ApiKey"]):
    def usable(self) -> ApiKeyQuerySet:
        """By the database's clock: one that steps on a console's host revives no key."""
        return self.filter(Q(expires_at__isnull=True) | Q(expires_at__gt=Now()), revoked_at__isnull=True)


class ApiKey(models.Model):
    """The secret is not stored. `sha256`: hex digest of the whole key; `prefix`: the part that people see."""

    class Scope(models.TextChoices):
        INFERENCE = "inference", "Send requests"
        READ = "read", "Read own data in the control API"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=64)
    prefix = models.CharField(max_length=16, unique=True)
    sha256 = models.CharField(max_length=64, unique=True)
    scopes = models.JSONField(default=list)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    objects = ApiKeyQuerySet.as_manager()

    class Meta:
        db_table = "api_key"
        verbose_name = "API key"
        verbose_name_plural = "API keys"
        ordering = ["tenant_id", "name", "id"]
        indexes = [models.Index(fields=["tenant"], name="api_key_live", condition=Q(revoked_at__isnull=True))]
        constraints = [models.CheckConstraint(condition=Q(sha256__regex=r"^[0-9a-f]{64}$"), name="api_key_sha256_hex")]

    def __str__(self) -> str:
        return f"{self.prefix}… ({self.name})"
