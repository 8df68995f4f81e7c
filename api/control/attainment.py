"""Attainment by class and tenant: over the last minute as gateways measure it, over the last hour or day from records.

A request attains its SLO if TTFT, TPOT and the deadline, if any, are met. Refused, expired, failed and cut requests are
misses; cancelled ones are counted separately.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any, ClassVar

from django.utils import timezone
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.framework.base import SIGNED_IN, ControlView
from api.control.framework.documented import LISTED, operation
from api.control.framework.gateways import fresh_fleets
from controller.core.messages import ClassWindow
from controller.selectors import catalogue
from controller.selectors.records.attainment import Attainment, attainment
from controller.slo.windows import merged_windows

WINDOWS = {"hour": timedelta(hours=1), "day": timedelta(days=1)}


class AttainmentQuery(serializers.Serializer):
    """Which window, and whose."""

    window = serializers.ChoiceField(choices=("now", *WINDOWS), default="now")
    tenant = serializers.CharField(max_length=64, required=False)
    slo_class = serializers.CharField(
        max_length=64, required=False, allow_blank=True, help_text="Empty: requests without a class."
    )


class AttainmentRow(serializers.Serializer):
    """One class of one tenant. Shares 0..1, seconds; null if not measured or not available for the window."""

    tenant = serializers.CharField()
    slo_class = serializers.CharField(help_text="Empty: requests without a class.")
    target = serializers.FloatField(allow_null=True, help_text="The share of requests that should attain their SLO.")
    attainment = serializers.FloatField(allow_null=True)
    finished = serializers.IntegerField(help_text="Includes misses, excludes cancellations.")
    attained = serializers.IntegerField()
    ttft_met = serializers.IntegerField()
    tpot_met = serializers.IntegerField()
    refused = serializers.IntegerField()
    expired = serializers.IntegerField(allow_null=True)
    failed = serializers.IntegerField()
    cancelled = serializers.IntegerField()
    goodput_tokens = serializers.IntegerField()
    first_tokens = serializers.IntegerField(
        allow_null=True,
        help_text="Requests with a measured first token, from which the TTFT quantiles are computed. Excludes refused "
        "and expired requests, and responses that were not streamed.",
    )
    ttft_p50_s = serializers.FloatField(allow_null=True, help_text="Of `first_tokens` requests, not of `finished`.")
    ttft_p95_s = serializers.FloatField(allow_null=True, help_text="Of `first_tokens` requests, not of `finished`.")
    tpot_p50_s = serializers.FloatField(allow_null=True)
    queued = serializers.IntegerField(allow_null=True)
    oldest_slack_s = serializers.FloatField(allow_null=True, help_text="Least time left until a first-token deadline.")
    miss_reason = serializers.CharField(allow_null=True, help_text="The most common cause of misses.")


class AttainmentOutput(serializers.Serializer):
    """All groups of one window; `age_s` is how old the newest figures are."""

    window = serializers.ChoiceField(choices=("now", *WINDOWS))
    since = serializers.DateTimeField()
    until = serializers.DateTimeField()
    age_s = serializers.FloatField(allow_null=True)
    items = AttainmentRow(many=True)


class AttainmentView(ControlView):
    """Attainment, quantiles and causes of misses of each class and tenant in one window."""

    access: ClassVar = {"GET": SIGNED_IN}

    @operation(
        "attainment", "Attainment by class and tenant", query=AttainmentQuery, answer=AttainmentOutput, errors=LISTED
    )
    def get(self, request: Request) -> Response:
        query = self.query(AttainmentQuery)
        if self.tenant_name is not None and query.get("tenant", self.tenant_name) != self.tenant_name:
            query["slo_class"], query["tenant"] = None, self.tenant_name
            return Response(AttainmentOutput(_answer(query, [], None)).data)
        query["tenant"] = self.tenant_name or query.get("tenant")
        answer = _now(query) if query["window"] == "now" else _recorded(query)
        return Response(AttainmentOutput(answer).data)


def _now(query: dict[str, Any]) -> dict[str, Any]:
    fleets = fresh_fleets()
    rows = [_live_row(window) for window in merged_windows(fleets)]
    wanted = (query.get("tenant"), query.get("slo_class"))
    kept = [row for row in rows if _matches((row["tenant"], row["slo_class"]), wanted)]
    seconds = max((window["window_s"] for fleet in fleets for window in fleet["classes"]), default=60.0)
    age_s = max(0.0, time.time() - max(fleet["at"] for fleet in fleets))
    return _answer(query, kept, age_s, timedelta(seconds=seconds))


def _recorded(query: dict[str, Any]) -> dict[str, Any]:
    until = timezone.now()
    found = attainment(
        since=until - WINDOWS[query["window"]],
        until=until,
        tenant=query.get("tenant"),
        slo_class=query.get("slo_class"),
    )
    targets = catalogue.targets()
    return _answer(query, [_recorded_row(row, targets) for row in found], None)


def _answer(
    query: dict[str, Any], rows: list[dict[str, Any]], age_s: float | None, length: timedelta | None = None
) -> dict[str, Any]:
    until = timezone.now()
    length = length or WINDOWS.get(query["window"], timedelta(minutes=1))
    return {"window": query["window"], "since": until - length, "until": until, "age_s": age_s, "items": rows}


def _matches(values: Iterable[str], wanted: Iterable[str | None]) -> bool:
    return all(want is None or value == want for value, want in zip(values, wanted, strict=True))


def _live_row(window: ClassWindow) -> dict[str, Any]:
    share = window["attained"] / window["finished"] if window["finished"] else None
    known = {"first_tokens": window.get("first_tokens"), "miss_reason": window["miss_reason"] or None}
    return {**window, **known, "attainment": share, "expired": None}


def _recorded_row(row: Attainment, targets: dict[tuple[str | None, str], float]) -> dict[str, Any]:
    """A row from records. The target is that of the tenant's own class, else of the shared class of that name; requests
    without a class have none."""
    name = row.slo_class or ""
    ttft, tpot = row.ttft_s or {}, row.tpot_s or {}
    return {
        **asdict(row),
        "target": targets.get((row.tenant, name), targets.get((None, name))),
        "attainment": row.share,
        "ttft_p50_s": ttft.get(0.5),
        "ttft_p95_s": ttft.get(0.95),
        "tpot_p50_s": tpot.get(0.5),
        "queued": None,
        "oldest_slack_s": None,
        "miss_reason": None,
    }
