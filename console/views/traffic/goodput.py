"""Goodput: how much of what was served was in time, by type of request, over the last hour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from console.access import allows
from console.charts import base as charts
from console.live.ttl_cache import TtlCache
from controller.selectors.records.goodput import COUNTS, Goodput, goodput
from controller.selectors.roles import UserRole
from controller.slo.request_types import RequestType
from controller.wording.values import REQUEST_TYPES

WINDOW = timedelta(hours=1)
KEPT_S = 5.0
ORDER = [each.value for each in RequestType]
READ: TtlCache[dict[str, Any]] = TtlCache(KEPT_S)


@require_GET
@allows(UserRole.VIEWER)
def goodput_page(request: HttpRequest) -> HttpResponse:
    return render(request, "console/traffic/goodput.html", READ.get(lambda: goodput_context(timezone.now())))


def goodput_context(now: datetime) -> dict[str, Any]:
    """One query: minutes are added up here."""
    cells = goodput(since=now - WINDOW, until=now, by=("minute", "tenant", "slo_class", "type"))
    types = _sums(cells, lambda row: (ORDER.index(row.type or ""),))
    minutes = _sums(cells, lambda row: (row.minute, row.type))
    seconds = WINDOW.total_seconds()
    return {
        "types": [_line(row, seconds) for row in types],
        "rows": [_line(row, seconds) for row in _sums(cells, lambda row: (row.tenant, row.slo_class, row.type))],
        "charts": {"goodput": _chart(minutes, now)},
        "chart_types": [
            {"name": REQUEST_TYPES[row.type or ""], "series": ORDER.index(row.type or "") + 1} for row in types
        ],
        "now": now,
    }


def _sums(rows: Sequence[Goodput], key: Callable[[Goodput], Any]) -> list[Goodput]:
    """One for each key, in its order. What the rows of one key differ in is that of its first."""
    groups: dict[Any, list[Goodput]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [
        replace(own[0], **{name: sum(getattr(row, name) for row in own) for name in COUNTS})
        for _, own in sorted(groups.items(), key=itemgetter(0))
    ]


def _line(row: Goodput, seconds: float) -> dict[str, Any]:
    return {
        "each": row,
        "name": REQUEST_TYPES[row.type or ""],
        "requests_per_min": row.in_time / seconds * 60,
        "tokens_per_s": row.goodput_tokens / seconds,
    }


def _chart(rows: Sequence[Goodput], now: datetime) -> charts.Spec:
    shown = [
        charts.Minute(
            at=row.minute.timestamp(),
            key=row.type,
            name=REQUEST_TYPES[row.type],
            finished=row.finished,
            attained=row.in_time,
            goodput_tokens=row.goodput_tokens,
        )
        for row in rows
        if row.minute is not None and row.type is not None
    ]
    window = charts.shortest_window([row.at for row in shown], now.timestamp(), WINDOW.total_seconds())
    spec = charts.goodput(shown, {name: index for index, name in enumerate(ORDER)}, *window)
    for trace in spec["traces"]:
        if len(trace["x"]) == 1:  # a line of one minute would show nothing
            trace |= {"mode": "markers", "marker": {"color": trace["line"]["color"], "size": 8}}
    return spec
