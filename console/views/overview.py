"""Overview: first paint from Redis and the database; then the live topic and a poll of the history keep it current."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from console.access import allows
from console.charts import base as charts
from console.live import live_view
from console.live.polled import fleet_now
from console.live.ttl_cache import TtlCache
from console.panels.history import links, overview_history
from controller.core.messages import FleetMessage
from controller.selectors.records import decisions
from controller.selectors.roles import UserRole
from controller.wording.sentences import message_of

CHARTS = (
    {
        "name": "attainment",
        "title": "Attainment by minute",
        "note": "share of requests that attained their SLO, last hour",
    },
    {"name": "goodput", "title": "Goodput", "note": "output tokens per second delivered in time, last hour"},
    {"name": "queue", "title": "Queue", "note": "waiting requests, since this page was opened"},
)
DECISIONS_SHOWN = 40
POLLED: TtlCache[dict[str, Any]] = TtlCache(5.0)
CARDS_MAX = 24  # more instances are shown as a map of small cells; also in static/js/pages/overview.js
BLANK_ROW = {"status": "idle", "status_text": "no traffic", "target": None, "ttft_counted": live_view.NO_REQUESTS}
STATE_BADGES = {"up": "ok", "draining": "warn", "down": "bad"}


@require_GET
@allows(UserRole.VIEWER)
def overview(request: HttpRequest) -> HttpResponse:
    fleets = read_fleets()
    now = timezone.now()
    history = overview_history(now)
    shown = live_view.overview(fleets)
    context = {
        "live": shown | {"summary": linked(shown["summary"])},
        "history": history | {"queue_chart": charts.queue_depth(now.timestamp())},
        "rows": merged_rows(shown["classes"], history["classes"]),
        "instances": [instance_card(each) for each in shown["instances"]],
        "decisions": [message_of(decision) for decision in decisions.newest(DECISIONS_SHOWN)],
        "charts": CHARTS,
        "blank_row": BLANK_ROW,
        "gateway_url": settings.GATEWAY_PUBLIC_URL,
        "now": now,
        "dense": len(shown["instances"]) > CARDS_MAX,
    }
    return render(request, "console/overview.html", context)


@require_GET
@allows(UserRole.VIEWER)
def overview_history_json(request: HttpRequest) -> JsonResponse:
    """Polled by every open Overview; computed once for all polls within a few seconds."""
    return JsonResponse(POLLED.get(lambda: overview_history(timezone.now())))


def linked(summary: live_view.Summary) -> dict[str, Any]:
    """Adds to each class of the summary the link to its misses."""
    lines = [line | links(*line["key"].split("/", 1)) if line["key"] else line for line in summary["lines"]]
    return {**summary, "lines": lines}


def read_fleets() -> list[FleetMessage]:
    """Only current ones: the first paint shows no age, so old figures would look current."""
    return fleet_now().fleets


def merged_rows(now: list[live_view.ClassRow], history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per class and tenant that had traffic in the last minute or the last 24 hours."""
    by_key: dict[str, dict[str, Any]] = {each["key"]: {**BLANK_ROW, **each} for each in history}
    for row in now:
        known = by_key.get(row["key"], links(row["tenant"], row["slo_class"]))
        by_key[row["key"]] = {**known, **row}
    rows = [by_key[key] for key in sorted(by_key)]
    for each in rows:
        if "series" in each:
            each["series_class"] = each["series"] % charts.SERIES + 1
    return rows


def instance_card(instance: Any) -> dict[str, Any]:
    load = instance["utilisation"]
    status = "bad" if load > 0.95 else "warn" if load > 0.8 else "ok"
    return {**instance, "badge": STATE_BADGES.get(instance["state"], "idle"), "load_status": status}
