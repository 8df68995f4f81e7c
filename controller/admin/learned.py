"""Versions of length forests and pattern graphs, without their content, and what gateways did with them; read-only."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from controller.admin.base import ReadOnlyAdmin
from controller.models import GraphVersion, LearnedTakeover, LengthVersion


class VersionAdmin(ReadOnlyAdmin):
    exclude = ("content",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer("content")


@admin.register(LengthVersion)
class LengthVersionAdmin(VersionAdmin):
    list_display = ("model", "version", "trained_at", "answers", "judged", "coverage", "pinball", "refused", "digest")
    search_fields = ("=model", "=digest")


@admin.register(GraphVersion)
class GraphVersionAdmin(VersionAdmin):
    list_display = ("tenant", "version", "trained_at", "workflows", "graphs", "judged", "error", "refused", "digest")
    search_fields = ("=tenant", "=digest")


@admin.register(LearnedTakeover)
class LearnedTakeoverAdmin(ReadOnlyAdmin):
    list_display = ("what", "subject", "version", "gateway", "problem", "first_at", "last_at", "times")
    list_filter = ("what",)
    search_fields = ("=subject", "=gateway")
