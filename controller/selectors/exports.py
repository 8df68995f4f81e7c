"""A filtered list as CSV or JSON, streamed page by page, so that memory does not grow with its size."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection
from django.db.models import Q, QuerySet

CHUNK = 1_000
# A spreadsheet runs cells that begin like this as formulas.
FORMULA = ("=", "+", "-", "@", "\t", "\r")

Row = Mapping[str, Any]


def csv_lines(rows: QuerySet[Any], newest_by: str, fields: Sequence[str]) -> AsyncIterator[str]:
    """A header, then one line for each row. `newest_by`: the time column that orders rows; ties go by primary key."""
    return _csv(_pages(rows, newest_by, fields), fields)


def json_lines(rows: QuerySet[Any], newest_by: str, fields: Sequence[str]) -> AsyncIterator[str]:
    """The same as one JSON array of objects."""
    return _json(_pages(rows, newest_by, fields))


async def _pages(rows: QuerySet[Any], newest_by: str, fields: Sequence[str]) -> AsyncIterator[list[Row]]:
    after: tuple[Any, Any] | None = None
    while True:
        found, after = await sync_to_async(_page)(rows, newest_by, fields, after)
        yield found
        if len(found) < CHUNK:
            return


def _page(
    rows: QuerySet[Any], newest_by: str, fields: Sequence[str], after: tuple[Any, Any] | None
) -> tuple[list[Row], tuple[Any, Any] | None]:
    if after is not None:
        at, pk = after
        rows = rows.filter(Q(**{f"{newest_by}__lte": at}), Q(**{f"{newest_by}__lt": at}) | Q(pk__lt=pk))
    found = list(rows.order_by(f"-{newest_by}", "-pk").values_list(newest_by, "pk", *fields)[:CHUNK])
    if not connection.in_atomic_block:
        connection.close()  # the stream may take long and does not need the connection
    last = found[-1][:2] if found else None
    return [dict(zip(fields, values[2:], strict=True)) for values in found], last


async def _csv(pages: AsyncIterator[list[Row]], fields: Sequence[str]) -> AsyncIterator[str]:
    yield _line(fields)
    async for page in pages:
        yield "".join(_line(_cell(row[name]) for name in fields) for row in page)


async def _json(pages: AsyncIterator[list[Row]]) -> AsyncIterator[str]:
    """One array with a row on each line, so that it can be read as a whole and line by line."""
    yield "[\n"
    first = True
    async for page in pages:
        lines = ",\n".join(json.dumps({name: _plain(value) for name, value in row.items()}) for row in page)
        if lines:
            yield lines if first else f",\n{lines}"
            first = False
    yield "\n]\n"


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    text = str(_plain(value))
    return f"'{text}" if isinstance(value, str) and text.startswith(FORMULA) else text


def _line(cells: Iterable[str]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(cells)
    return out.getvalue()
