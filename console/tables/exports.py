"""Export of a filtered list as a CSV or JSON file, streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponseBase, StreamingHttpResponse
from django.utils import timezone

from controller.selectors.exports import csv_lines, json_lines

FORMATS = {"csv": ("text/csv; charset=utf-8", csv_lines), "json": ("application/json", json_lines)}


def export(rows: QuerySet[Any], newest_by: str, fields: Sequence[str], form: str, name: str) -> HttpResponseBase:
    """`form`: of FORMATS. All rows, newest first by `newest_by`."""
    kind, lines = FORMATS[form]
    file = f"{name}-{timezone.now():%Y%m%d-%H%M%S}.{form}"
    head = {"Content-Disposition": f'attachment; filename="{file}"'}
    return StreamingHttpResponse(lines(rows.order_by(), newest_by, fields), content_type=kind, headers=head)
