"""Keyset pagination: `limit` rows after `cursor`, without OFFSET and without counting large tables.

A page is `{"items": [...], "next_cursor": "..." | null}`. The cursor is opaque to callers. It holds the sort
values of the last row, so every page costs the same, and rows added in the meantime do not shift pages.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Field, Model, Q, QuerySet

from api.control.framework.errors import ControlApiError

LIMIT_DEFAULT = 50
LIMIT_MAX = 500
CURSOR_LENGTH_MAX = 1_000


class InvalidCursor(ControlApiError):
    """The cursor is not from this list, or was changed."""

    default_code = "invalid_cursor"

    def __init__(self) -> None:
        message = "Invalid cursor for this list. Start again without it."
        super().__init__(message, {"cursor": [message]})


@dataclass(frozen=True, slots=True)
class CursorPage:
    """One page. `items`: rows; `next_cursor`: None on the last page."""

    items: Sequence[Any]
    next_cursor: str | None


def paginate(rows: QuerySet[Any], order: Sequence[str], limit: int, cursor: str | None) -> CursorPage:
    """The page after `cursor`, of at most `limit` rows in `order` (field names, "-" for descending, the last one
    unique). Raises InvalidCursor."""
    ordered = rows.order_by(*order)
    if cursor:
        ordered = ordered.filter(_after(order, _decode(cursor, rows.model, order)))
    found = list(ordered[: limit + 1])
    more = len(found) > limit
    return CursorPage(found[:limit], _encode(found[limit - 1], order) if more else None)


def _after(order: Sequence[str], values: Sequence[Any]) -> Q:
    """A filter for rows that sort after `values`: a.gt | (a.eq & (b.gt | ...)), with a plain range in front that an
    index can use."""
    condition = Q()
    for name, value in reversed(list(zip(order, values, strict=True))):
        field, way = (name[1:], "lt") if name.startswith("-") else (name, "gt")
        beyond = Q(**{f"{field}__{way}": value})
        condition = beyond | (Q(**{field: value}) & condition) if condition else beyond
    first = order[0]
    bound = "lte" if first.startswith("-") else "gte"
    return Q(**{f"{first.lstrip('-')}__{bound}": values[0]}) & condition


def _encode(row: Model, order: Sequence[str]) -> str:
    values = [str(_value(row, name.lstrip("-"))) for name in order]
    return base64.urlsafe_b64encode(json.dumps(values, separators=(",", ":")).encode()).decode().rstrip("=")


def _value(row: Model, path: str) -> Any:
    value: Any = row
    for part in path.split("__"):
        value = getattr(value, part)
    return value


def _decode(cursor: str, model: type[Model], order: Sequence[str]) -> list[Any]:
    try:
        raw = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if not isinstance(raw, list) or len(raw) != len(order):
            raise InvalidCursor
        return [_typed(model, name.lstrip("-"), text) for name, text in zip(order, raw, strict=True)]
    except (
        binascii.Error,
        UnicodeError,
        ValueError,
        TypeError,
        OverflowError,
        ValidationError,
        RecursionError,
    ) as error:
        raise InvalidCursor from error


def _typed(model: type[Model], path: str, text: Any) -> Any:
    """A sort value of a cursor in the type of its field. Raises InvalidCursor if it is not one."""
    if not isinstance(text, str) or "\x00" in text:
        raise InvalidCursor
    *parents, last = path.split("__")
    for part in parents:
        related = model._meta.get_field(part).related_model
        model = related  # type: ignore[assignment]
    field = model._meta.get_field(last)
    assert isinstance(field, Field), path
    value = field.to_python(text)
    if value is None or (isinstance(value, datetime) and not _is_utc_time(value)):
        raise InvalidCursor
    text.encode()  # lone surrogates cannot be sent to PostgreSQL
    return value


def _is_utc_time(value: datetime) -> bool:
    """Whether the time has a zone, and is not so close to the calendar's ends that zone arithmetic would fail."""
    return value.tzinfo is not None and 1 < value.year < 9999
