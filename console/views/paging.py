"""Pages of lists. Keyset pages: the rows after the last one shown, read by an index. No OFFSET, no count, whatever the
table's size. Numbered pages: of lists that are in memory."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from typing import Any

from django.core.exceptions import BadRequest, ValidationError
from django.db.models import Field, Model, Q, QuerySet
from django.http import HttpRequest


@dataclass(frozen=True, slots=True)
class NumberedPage:
    """Of a list that is in memory as a whole. `number`: from 1."""

    rows: Sequence[Any]
    number: int
    pages: int
    all_rows: int


def numbered_page(rows: Sequence[Any], asked: int | None, size: int) -> NumberedPage:
    """`asked`: None is the first page; one beyond the last is the last."""
    pages = max(1, ceil(len(rows) / size))
    number = min(max(1, asked or 1), pages)
    return NumberedPage(rows[(number - 1) * size : number * size], number, pages, len(rows))


@dataclass(frozen=True, slots=True)
class KeysetPage:
    """`after` is where the next page starts, None on the last one."""

    rows: Sequence[Any]
    after: str | None

    def next_url(self, request: HttpRequest) -> str | None:
        if self.after is None:
            return None
        query = request.GET.copy()
        query["after"] = self.after
        return f"{request.path}?{query.urlencode()}"


def page_of(rows: QuerySet[Any], order: tuple[str, str], after: str | None, size: int) -> KeysetPage:
    """`order`: two descending fields, the second unique. Raises BadRequest for an `after` that page_of did not make."""
    first, second = (name.lstrip("-") for name in order)
    ordered = rows.order_by(*order)
    if after:
        at, key = _decoded(after, rows.model, first, second)
        # The index uses the first bound; the second condition resolves ties.
        ordered = ordered.filter(Q(**{f"{first}__lte": at}), Q(**{f"{first}__lt": at}) | Q(**{f"{second}__lt": key}))
    found = list(ordered[: size + 1])
    more = len(found) > size
    return KeysetPage(found[:size], _encoded(found[size - 1], first, second) if more else None)


def _encoded(row: Model, first: str, second: str) -> str:
    at = getattr(row, first)
    value = at.isoformat() if isinstance(at, datetime) else at
    raw = json.dumps([value, getattr(row, second)]).encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _decoded(after: str, model: type[Model], first: str, second: str) -> tuple[Any, Any]:
    try:
        at, key = json.loads(base64.urlsafe_b64decode(after + "=" * (-len(after) % 4)))
        values = (_typed(model, first, at), _typed(model, second, key))
    except (binascii.Error, ValueError, TypeError, OverflowError, RecursionError, ValidationError) as error:
        raise BadRequest("after: not a page of this list") from error
    if None in values or "\x00" in str(values) or not _storable(values[0]):
        raise BadRequest("after: not a page of this list")
    return values[0], values[1]


def _typed(model: type[Model], name: str, value: Any) -> Any:
    field = model._meta.get_field(name)
    assert isinstance(field, Field), name
    return field.to_python(value)


def _storable(value: Any) -> bool:
    """A time must have a zone, and room for conversion to other zones at both ends of the calendar."""
    return not isinstance(value, datetime) or (value.tzinfo is not None and 1 < value.year < 9999)
