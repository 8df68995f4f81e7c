"""Read-only tables, pages that never count a large table, and the audit of changes made in the admin site."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

ROWS_PAGED = 5_000  # for more, filter or export


class BoundedPaginator(Paginator):
    """Counts and shows the first ROWS_PAGED rows only, so that no page reads a whole table."""

    object_list: QuerySet[Any]

    @cached_property
    def count(self) -> int:
        return self.object_list.order_by()[:ROWS_PAGED].count()


class ReadOnlyAdmin(admin.ModelAdmin):
    """Whoever the site lets in can view; nobody can add, change or delete."""

    list_per_page = 50
    list_max_show_all = 200
    show_full_result_count = False
    paginator = BoundedPaginator
    actions = None

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.admin_site.has_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_module_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
