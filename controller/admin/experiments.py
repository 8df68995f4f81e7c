"""Experiments and traces, read-only."""

from __future__ import annotations

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from controller.admin.base import ReadOnlyAdmin
from controller.models import Experiment, ExperimentRun, Trace


@admin.register(Experiment)
class ExperimentAdmin(ReadOnlyAdmin):
    list_display = (
        "slug",
        "name",
        "kind",
        "state",
        "progress",
        "kept",
        "attempts",
        "created_by",
        "created_at",
        "ended_at",
    )
    list_filter = ("state", "kind", "kept")
    search_fields = ("=slug", "name", "=created_by")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Experiment]:
        match = request.resolver_match
        rows = super().get_queryset(request)
        in_list = match is not None and (match.url_name or "").endswith("_changelist")
        return rows.defer("spec", "result") if in_list else rows


@admin.register(ExperimentRun)
class ExperimentRunAdmin(ReadOnlyAdmin):
    list_display = ("experiment", "number", "label", "rate", "seed", "seconds")
    list_select_related = ("experiment",)
    search_fields = ("=experiment__slug", "label")

    def get_queryset(self, request: HttpRequest) -> QuerySet[ExperimentRun]:
        return super().get_queryset(request).defer("report", "experiment__spec", "experiment__result")


@admin.register(Trace)
class TraceAdmin(ReadOnlyAdmin):
    list_display = ("slug", "name", "requests", "span_s", "input_tokens_mean", "output_tokens_mean", "created_at")
    search_fields = ("=slug", "name")
    exclude = ("content",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Trace]:
        return super().get_queryset(request).defer("content")
