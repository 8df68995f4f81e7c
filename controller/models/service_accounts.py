"""Service accounts, by which programs use the control API, and their tokens."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from controller.models.base import NAME, Versioned


class ServiceAccount(Versioned):
    """A program with a role; `scopes` narrow what it may change and read. Decisions refer to `name`, so it never
    changes."""

    class Role(models.TextChoices):
        VIEWER = "viewer", "Viewer"
        OPERATOR = "operator", "Operator"
        ADMIN = "admin", "Admin"

    class Scope(models.TextChoices):
        READ = "read", "Read everything that the role may see"
        CONFIGURATION = "configuration", "SLO classes, priority mappings, scaling policies and flow settings"
        TENANTS = "tenants", "Tenants and their API keys"
        FLEET = "fleet", "Instances, launch templates, models, hosts, devices and links"
        QUEUE = "queue", "Commands to the queue"
        EXPERIMENTS = "experiments", "Experiments and traces"

    class State(models.TextChoices):
        ACTIVE = "active", "Active"
        SUSPENDED = "suspended", "Suspended"

    name = models.CharField(max_length=64, unique=True, validators=[NAME])
    title = models.CharField(max_length=120, blank=True)
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.VIEWER)
    scopes = models.JSONField(default=list)
    state = models.CharField(max_length=16, choices=State.choices, default=State.ACTIVE)

    class Meta:
        db_table = "service_account"
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(
                condition=Q(role__in=["viewer", "operator", "admin"]), name="service_account_role_known"
            ),
            models.CheckConstraint(condition=Q(state__in=["active", "suspended"]), name="service_account_state_known"),
        ]

    def __str__(self) -> str:
        return self.name


class ServiceTokenQuerySet(models.QuerySet["ServiceToken"]):
    def usable(self) -> ServiceTokenQuerySet:
        """By the database's clock: one that steps on a console's host revives no token."""
        return self.filter(expires_at__gt=Now(), revoked_at__isnull=True)


class ServiceToken(models.Model):
    """The secret is not stored: `sha256` is the hex digest of the whole token, `prefix` the part that people see."""

    account = models.ForeignKey(ServiceAccount, on_delete=models.CASCADE, related_name="tokens")
    prefix = models.CharField(max_length=16, unique=True)
    sha256 = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    objects = ServiceTokenQuerySet.as_manager()

    class Meta:
        db_table = "service_token"
        ordering = ["account_id", "-created_at", "-id"]
        constraints = [
            models.CheckConstraint(condition=Q(sha256__regex=r"^[0-9a-f]{64}$"), name="service_token_sha256_hex")
        ]

    def __str__(self) -> str:
        return f"{self.prefix}…"
