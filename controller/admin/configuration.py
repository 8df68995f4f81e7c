"""Configuration and fleet, read-only."""

from __future__ import annotations

from django.contrib import admin

from controller.admin.base import ReadOnlyAdmin
from controller.models import (
    ApiKey,
    Device,
    FlowSettings,
    Host,
    Instance,
    LatencyProfile,
    LaunchTemplate,
    Link,
    PriorityMapping,
    ProvisionerLook,
    ScalingPolicy,
    ServedModel,
    SLOClass,
    Tenant,
)


@admin.register(Tenant)
class TenantAdmin(ReadOnlyAdmin):
    list_display = (
        "name", "title", "default_class", "rpm", "tpm", "max_concurrency", "queue_share", "state", "version"
    )  # fmt: skip
    list_filter = ("state",)
    list_select_related = ("default_class",)
    search_fields = ("name", "title")


@admin.register(ApiKey)
class ApiKeyAdmin(ReadOnlyAdmin):
    list_display = ("prefix", "name", "tenant", "scopes", "created_at", "expires_at", "revoked_at", "last_used_at")
    list_select_related = ("tenant",)
    search_fields = ("^prefix", "name", "tenant__name")
    exclude = ("sha256",)


@admin.register(SLOClass)
class SLOClassAdmin(ReadOnlyAdmin):
    list_display = ("name", "tenant", "ttft_s", "tpot_s", "deadline_s", "waiting_time_s", "target", "value", "version")
    list_select_related = ("tenant",)
    search_fields = ("name", "title")


@admin.register(PriorityMapping)
class PriorityMappingAdmin(ReadOnlyAdmin):
    list_display = ("__str__", "window", "window_age_s", "contention", "version", "updated_at")
    list_select_related = ("tenant",)


@admin.register(ServedModel)
class ServedModelAdmin(ReadOnlyAdmin):
    list_display = ("name", "aliases", "context_tokens", "tokenizer", "version")
    search_fields = ("name",)


@admin.register(LatencyProfile)
class LatencyProfileAdmin(ReadOnlyAdmin):
    list_display = ("model", "device_kind", "tp", "role", "samples", "source", "fitted_at", "active")
    list_filter = ("active",)
    list_select_related = ("model",)


@admin.register(Host)
class HostAdmin(ReadOnlyAdmin):
    list_display = ("name", "zone", "labels", "version")
    search_fields = ("name",)


@admin.register(Device)
class DeviceAdmin(ReadOnlyAdmin):
    list_display = ("host", "index", "kind", "memory_bytes")
    list_select_related = ("host",)


@admin.register(Link)
class LinkAdmin(ReadOnlyAdmin):
    list_display = ("source", "target", "medium", "bandwidth_bytes_s", "latency_s", "state")
    list_select_related = ("source", "target")


@admin.register(Instance)
class InstanceAdmin(ReadOnlyAdmin):
    list_display = (
        "id", "model", "role", "backend", "provisioner", "desired_state", "observed_state", "weights", "url",
        "ready_at", "error",
    )  # fmt: skip
    list_filter = ("desired_state", "observed_state", "weights", "provisioner", "role")
    list_select_related = ("model",)
    search_fields = ("id", "url")


@admin.register(LaunchTemplate)
class LaunchTemplateAdmin(ReadOnlyAdmin):
    list_display = ("name", "backend", "health_path", "start_limit_s", "paused_at", "paused_reason", "version")
    list_filter = ("backend",)
    search_fields = ("name",)


@admin.register(ProvisionerLook)
class ProvisionerLookAdmin(ReadOnlyAdmin):
    list_display = ("name", "instances", "seen_at", "failing_since", "error")


@admin.register(ScalingPolicy)
class ScalingPolicyAdmin(ReadOnlyAdmin):
    list_display = ("model", "role", "min_instances", "max_instances", "upper", "lower", "warm", "enabled", "version")
    list_select_related = ("model",)


@admin.register(FlowSettings)
class FlowSettingsAdmin(ReadOnlyAdmin):
    list_display = ("__str__", "flow_policy", "drop_budget", "version", "updated_at")
