"""Goodput: how much of what was served was in time, by type of request, over the last hour or day."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import OperationalError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from console.access import allows
from console.charts import base as charts
from console.forms.base import GoodputSearch
from console.live.ttl_cache import TtlCache
from controller.selectors.records.goodput import Goodput, ended_workflows, goodput
from controller.selectors.roles import UserRole
from controller.slo.request_types import RequestType
from controller.wording.values import REQUEST_TYPES

log = logging.getLogger(__name__)

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
# How long, and what one point of the chart covers.
WINDOWS = {"hour": (HOUR, timedelta(minutes=1)), "day": (DAY, timedelta(minutes=15))}
WINDOW_NAMES = {"hour": "last hour", "day": "last 24 hours"}
KEPT_S = 5.0
MOST_MISSED = 20  # workflows listed
ORDER = [each.value for each in RequestType]
READ: dict[str, TtlCache[dict[str, Any]]] = {window: TtlCache(KEPT_S) for window in WINDOWS}  # of all tenants


@require_GET
@allows(UserRole.VIEWER)
def goodput_page(request: HttpRequest) -> HttpResponse:
    """If the database takes longer than its limit: what was read last, with its age, or 503 if there is nothing."""
    form = GoodputSearch(request.GET)
    wanted = form.cleaned_data if form.is_valid() else {}
    window, tenant = wanted.get("window") or "hour", wanted.get("tenant", "")
    shown: dict[str, Any] = {"form": form, "window": WINDOW_NAMES[window], "filters": bool(tenant)}
    if form.errors:
        return render(request, "console/traffic/goodput.html", shown)
    try:
        if tenant:
            shown |= goodput_context(timezone.now(), window, tenant)
        else:
            shown |= READ[window].get(lambda: goodput_context(timezone.now(), window))
    except OperationalError as error:
        log.warning("goodput was not read: %s", error, extra={"action": "goodput_not_read"})
        last = None if tenant else READ[window].last()
        shown |= {"not_read": True, **(last or {})}
        return render(request, "console/traffic/goodput.html", shown, status=200 if last else 503)
    return render(request, "console/traffic/goodput.html", shown)


def goodput_context(now: datetime, window: str, tenant: str | None = None) -> dict[str, Any]:
    """Four queries of stored minutes and workflows. `tenant`: None is all of them."""
    length, step = WINDOWS[window]
    read: dict[str, Any] = {"since": now - length, "until": now, "tenant": tenant}
    steps = goodput(**read, by=("minute", "type"), bucket=step)
    types = goodput(**read, by=("type",))
    groups = goodput(**read, by=("tenant", "slo_class", "type"))
    seconds = length.total_seconds()
    in_order = sorted(types, key=lambda row: ORDER.index(row.type or ""))
    return {
        "types": [_line(row, seconds) for row in in_order],
        "rows": [_line(row, seconds) for row in groups],
        "missed": ended_workflows(**read, in_time=False, most=MOST_MISSED),
        "most_missed": MOST_MISSED,
        "charts": {"goodput": _chart(steps, now, length, step)},
        "step": "by minute" if step == timedelta(minutes=1) else f"by {step.seconds // 60} minutes",
        "chart_types": [
            {"name": REQUEST_TYPES[row.type or ""], "series": ORDER.index(row.type or "") + 1} for row in in_order
        ],
        "now": now,
    }


def _line(row: Goodput, seconds: float) -> dict[str, Any]:
    return {
        "each": row,
        "name": REQUEST_TYPES[row.type or ""],
        "requests_per_min": row.in_time / seconds * 60,
        "tokens_per_s": row.goodput_tokens / seconds,
    }


def _chart(rows: Sequence[Goodput], now: datetime, length: timedelta, step: timedelta) -> charts.Spec:
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
    window = charts.shortest_window([row.at for row in shown], now.timestamp(), length.total_seconds())
    palette = {name: index for index, name in enumerate(ORDER)}
    spec = charts.goodput(shown, palette, *window, step_s=step.total_seconds(), to_end=True)
    for trace in spec["traces"]:
        if len(trace["x"]) == 1:  # a line of one minute would show nothing
            trace |= {"mode": "markers", "marker": {"color": trace["line"]["color"], "size": 8}}
    return spec
