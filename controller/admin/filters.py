"""Filters of the large tables: by value (choices come from an index) and by time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils import timezone

from controller.selectors.records.distinct import distinct

WINDOWS = (
    ("15m", "15 minutes", timedelta(minutes=15)),
    ("1h", "hour", timedelta(hours=1)),
    ("1d", "day", timedelta(days=1)),
    ("7d", "7 days", timedelta(days=7)),
    ("30d", "30 days", timedelta(days=30)),
)


def by_value(table: type[Model], field: str, title_text: str) -> type[admin.SimpleListFilter]:
    class ByValue(admin.SimpleListFilter):
        title = title_text
        parameter_name = field

        def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
            return [(value, value or "(none)") for value in distinct(table, field)]

        def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
            return queryset if self.value() is None else queryset.filter(**{field: self.value()})

    return ByValue


def within(field: str) -> type[admin.SimpleListFilter]:
    class Within(admin.SimpleListFilter):
        """A window that ends now. For any other: `?<field>__gte=2026-01-31T00:00Z&<field>__lt=...` in the address."""

        title = "time"
        parameter_name = "within"

        def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
            return [(name, f"last {label}") for name, label, _ in WINDOWS]

        def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
            for name, _, length in WINDOWS:
                if self.value() == name:
                    return queryset.filter(**{f"{field}__gte": timezone.now() - length})
            return queryset

    return Within
