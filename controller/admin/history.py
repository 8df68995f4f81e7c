"""The audit log and the request records: read-only, with filters by kind, actor, subject and time, and export."""

from __future__ import annotations

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from controller.admin.base import ReadOnlyAdmin
from controller.admin.export import ExportAdmin
from controller.admin.filters import by_value, within
from controller.core.types import RECORD_FIELDS
from controller.models import Action, AttainmentMinute, Decision, GoodputMinute, RequestRecord, Transfer, WorkflowResult


@admin.register(Decision)
class DecisionAdmin(ExportAdmin):
    list_display = ("at", "kind", "actor", "actor_type", "subject_type", "subject", "reason")
    list_display_links = ("at", "kind")
    list_filter = (
        within("at"),
        by_value(Decision, "kind", "kind"),
        by_value(Decision, "actor", "actor"),
        by_value(Decision, "subject_type", "kind of subject"),
        "actor_type",
    )
    search_fields = ("=subject", "=actor", "=kind", "=request_id", "reason")
    search_help_text = "A whole subject, actor, kind or request id, or a part of the reason."
    ordering = ("-at", "-id")
    newest_by = "at"
    export_fields = (
        "id", "at", "actor_type", "actor", "kind", "subject_type", "subject", "reason", "inputs", "outcome", "rejected",
        "request_id",
    )  # fmt: skip


@admin.register(Action)
class ActionAdmin(ReadOnlyAdmin):
    list_display = ("id", "kind", "instance", "state", "tries", "actor", "created_at", "ended_at", "error")
    list_filter = ("kind", "state", within("created_at"))
    list_select_related = ("instance",)
    search_fields = ("=instance__id",)
    search_help_text = "A whole instance id."


@admin.register(Transfer)
class TransferAdmin(ReadOnlyAdmin):
    list_display = (
        "id", "source_kind", "source", "target", "attempt", "bytes", "seconds", "state", "error", "recorded_at",
    )  # fmt: skip
    list_filter = ("source_kind", "state", within("recorded_at"))
    search_fields = ("=source", "=target")


@admin.register(RequestRecord)
class RequestRecordAdmin(ExportAdmin):
    list_display = (
        "arrived_at", "id", "tenant", "slo_class", "model", "instance", "outcome", "attained", "ttft_s", "tpot_s",
        "e2e_s", "stands_for",
    )  # fmt: skip
    list_display_links = ("arrived_at", "id")
    list_filter = (
        within("arrived_at"),
        by_value(RequestRecord, "tenant", "tenant"),
        by_value(RequestRecord, "slo_class", "class"),
        "outcome",
        "attained",
    )
    search_fields = ("=id", "=instance", "=prefill_instance", "=workflow", "=error_code")
    search_help_text = "A whole request id, instance, workflow or error code."
    ordering = ("-arrived_at", "-id")
    newest_by = "arrived_at"
    export_fields = RECORD_FIELDS

    def get_queryset(self, request: HttpRequest) -> QuerySet[RequestRecord]:
        match = request.resolver_match
        rows = super().get_queryset(request)
        in_list = match is not None and (match.url_name or "").endswith("_changelist")
        return rows.defer("decisions", "token_times") if in_list else rows


@admin.register(AttainmentMinute)
class AttainmentMinuteAdmin(ReadOnlyAdmin):
    list_display = ("minute", "tenant", "slo_class", "model", "finished", "attained", "cancelled", "goodput_tokens")
    list_filter = (within("minute"),)
    search_fields = ("=tenant", "=slo_class", "=model")


@admin.register(GoodputMinute)
class GoodputMinuteAdmin(ReadOnlyAdmin):
    list_display = (
        "minute", "tenant", "slo_class", "type", "finished", "in_time", "cancelled", "tokens", "goodput_tokens",
    )  # fmt: skip
    list_filter = (within("minute"), "type")
    search_fields = ("=tenant", "=slo_class")
    search_help_text = "A whole tenant or class."


@admin.register(WorkflowResult)
class WorkflowResultAdmin(ReadOnlyAdmin):
    list_display = (
        "ends_at", "tenant", "workflow", "slo_class", "in_time", "excluded", "due_at", "ended_at", "requests", "failed",
        "missed", "tokens", "cancelled_by", "cancelled_at",
    )  # fmt: skip
    list_display_links = ("ends_at", "workflow")
    list_filter = (within("ends_at"), "in_time", "excluded", "cancelled_by")
    search_fields = ("=tenant", "=workflow", "=slo_class")
    search_help_text = "A whole tenant, workflow or class."
