"""CSV of everything a filtered list holds, streamed page by page: memory stays flat however many rows there are."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection
from django.db.models import Q, QuerySet
from django.http import HttpRequest, StreamingHttpResponse
from django.urls import URLPattern, path
from django.utils import timezone

from controller.admin.base import ReadOnlyAdmin

CHUNK = 1_000
# A spreadsheet runs what begins like this as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class ExportAdmin(ReadOnlyAdmin):
    """Adds `export/` to a list, with the list's own filters. `newest_by`: the time column; ties go by primary key."""

    change_list_template = "admin/controller/change_list_export.html"
    newest_by: str
    export_fields: Sequence[str]

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_export"
        return [path("export/", self.admin_site.admin_view(self.export), name=name), *super().get_urls()]

    def export(self, request: HttpRequest) -> StreamingHttpResponse:
        rows = self.get_changelist_instance(request).get_queryset(request)
        name = f"{self.opts.db_table}-{timezone.now():%Y%m%d-%H%M%S}.csv"
        return StreamingHttpResponse(
            _lines(rows.order_by(), self.newest_by, self.export_fields),
            content_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )


async def _lines(rows: QuerySet[Any], newest_by: str, fields: Sequence[str]) -> AsyncIterator[str]:
    yield _line(fields)
    after: tuple[Any, Any] | None = None
    while True:
        chunk = await sync_to_async(_chunk)(rows, newest_by, fields, after)
        if chunk:
            yield "".join(_line([_cell(value) for value in values]) for *_, values in chunk)
        if len(chunk) < CHUNK:
            return
        after = chunk[-1][:2]


def _chunk(
    rows: QuerySet[Any], newest_by: str, fields: Sequence[str], after: tuple[Any, Any] | None
) -> list[tuple[Any, Any, Sequence[Any]]]:
    if after is not None:
        at, pk = after
        rows = rows.filter(Q(**{f"{newest_by}__lt": at}) | Q(**{newest_by: at, "pk__lt": pk}))
    found = rows.order_by(f"-{newest_by}", "-pk").values_list(newest_by, "pk", *fields)[:CHUNK]
    try:
        return [(at, pk, values) for at, pk, *values in found]
    finally:
        if not connection.in_atomic_block:
            connection.close()  # the stream may last; the connection need not


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return str(value)


def _line(cells: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(cells)
    return out.getvalue()
