"""A filtered list as CSV, streamed page by page, so that memory does not grow with the number of rows."""

from __future__ import annotations

from collections.abc import Sequence

from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import BadRequest
from django.http import HttpRequest, StreamingHttpResponse
from django.urls import URLPattern, path
from django.utils import timezone

from controller.admin.base import ReadOnlyAdmin
from controller.selectors.exports import csv_lines


class ExportAdmin(ReadOnlyAdmin):
    """Adds `export/` to a list, with the filters of the list. `newest_by`: the time column; ties go by primary key."""

    change_list_template = "admin/controller/change_list_export.html"
    newest_by: str
    export_fields: Sequence[str]

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_export"
        return [path("export/", self.admin_site.admin_view(self.export), name=name), *super().get_urls()]

    def export(self, request: HttpRequest) -> StreamingHttpResponse:
        if "\x00" in "".join(map(str, request.GET.values())):  # otherwise it would fail after the answer has begun
            raise BadRequest("A filter holds a NUL character.")
        try:
            rows = self.get_changelist_instance(request).get_queryset(request)
        except IncorrectLookupParameters as error:
            raise BadRequest("A filter that this list does not have.") from error
        name = f"{self.opts.db_table}-{timezone.now():%Y%m%d-%H%M%S}.csv"
        return StreamingHttpResponse(
            csv_lines(rows.order_by(), self.newest_by, self.export_fields),
            content_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )
