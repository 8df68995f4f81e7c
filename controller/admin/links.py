"""Links between instances and KV transfers, read-only."""

from __future__ import annotations

from django.contrib import admin

from controller.admin.base import ReadOnlyAdmin
from controller.admin.filters import within
from controller.models import InstanceLink, KvTransfer


@admin.register(InstanceLink)
class InstanceLinkAdmin(ReadOnlyAdmin):
    list_display = (
        "source", "target", "model", "state", "since", "bandwidth_bytes_s", "latency_s", "bytes", "failures",
        "last_error", "closed_at",
    )  # fmt: skip
    list_filter = ("state", within("closed_at"))
    search_fields = ("=source", "=target")
    search_help_text = "A whole instance id."


@admin.register(KvTransfer)
class KvTransferAdmin(ReadOnlyAdmin):
    list_display = (
        "started_at", "request", "attempt", "source", "target", "outcome", "state", "reason", "bytes", "seconds",
        "overlap_s", "held_s", "flow", "measured_by",
    )  # fmt: skip
    list_filter = ("outcome", "state", within("started_at"))
    search_fields = ("=request", "=source", "=target")
    search_help_text = "A whole request or instance id."
