"""Goodput by type of request over the last minutes: a workflow counts once, all or nothing."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import ClassVar

from django.utils import timezone
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.framework.base import SIGNED_IN, ControlView
from api.control.framework.documented import LISTED, operation
from controller.selectors.records.goodput import MINUTE, Goodput, goodput, stage_goodput
from controller.slo.request_types import RequestType

MOST_MINUTES = 24 * 60
MOST_STAGE_MINUTES = 60  # the requests themselves are read, not a roll-up
BY_MINUTE = 60  # minutes; of more than these a row covers STEP
STEP = timedelta(minutes=15)
TYPES = [each.value for each in RequestType]


class GoodputQuery(serializers.Serializer):
    """Which minutes, by what, and whose."""

    minutes = serializers.IntegerField(
        min_value=1, max_value=MOST_MINUTES, default=60, help_text="How far back, whole minutes."
    )
    by = serializers.ChoiceField(
        choices=("type", "tenant", "slo_class", "minute"), default="type", help_text="Each of them by type as well."
    )
    tenant = serializers.CharField(max_length=64, required=False)


class GoodputRow(serializers.Serializer):
    """One group. Null: not grouped by it; shares 0..1, null without requests."""

    type = serializers.ChoiceField(
        choices=TYPES,
        help_text="What the request asked for. `compound`: a workflow; its requests are not counted again.",
    )
    tenant = serializers.CharField(allow_null=True)
    slo_class = serializers.CharField(
        allow_null=True, help_text="Empty: without a class. Of a workflow that of its first request."
    )
    minute = serializers.DateTimeField(
        allow_null=True, help_text="Of arrival; of a workflow when it ended. Of more than 60 minutes a row covers 15."
    )
    finished = serializers.IntegerField(
        help_text="Requests or workflows. Includes misses, excludes cancellations and workflows that are not due yet."
    )
    in_time = serializers.IntegerField()
    cancelled = serializers.IntegerField()
    share = serializers.FloatField(allow_null=True, help_text="`in_time` of `finished`.")
    tokens = serializers.IntegerField(
        help_text="Of all answers; for `deadline` and `compound` those of their prompts as well."
    )
    goodput_tokens = serializers.IntegerField(
        help_text="Of `tokens` those in time; for `deadline` and `compound` all of a request or workflow, or none."
    )
    token_share = serializers.FloatField(allow_null=True, help_text="`goodput_tokens` of `tokens`.")


class GoodputOutput(serializers.Serializer):
    """All groups of the window."""

    since = serializers.DateTimeField()
    until = serializers.DateTimeField()
    items = GoodputRow(many=True)


class GoodputView(ControlView):
    """How much of what was served was in time, by type of request. It has each request within seconds after its end."""

    access: ClassVar = {"GET": SIGNED_IN}

    @operation("goodput", "Goodput by type of request", query=GoodputQuery, answer=GoodputOutput, errors=LISTED)
    def get(self, request: Request) -> Response:
        query, until = self.query(GoodputQuery), timezone.now()
        since = until.replace(second=0, microsecond=0) - timedelta(minutes=query["minutes"])
        by = ("type",) if query["by"] == "type" else (query["by"], "type")
        asked = query.get("tenant", self.tenant_name)
        bucket = MINUTE if query["minutes"] <= BY_MINUTE else STEP
        foreign = self.tenant_name is not None and asked != self.tenant_name
        found = [] if foreign else goodput(since=since, until=until, by=by, tenant=asked, bucket=bucket)
        return Response(GoodputOutput({"since": since, "until": until, "items": map(_row, found)}).data)


def _row(row: Goodput) -> dict[str, object]:
    return {**asdict(row), "share": row.share, "token_share": row.token_share}


class StageQuery(serializers.Serializer):
    """Which workflows, by when they ended."""

    minutes = serializers.IntegerField(
        min_value=1, max_value=MOST_STAGE_MINUTES, default=15, help_text="How far back, whole minutes."
    )
    tenant = serializers.CharField(max_length=64, required=False)


class StageRow(serializers.Serializer):
    """A stage of a tenant's workflows that ended, without workflows that their clients cancelled."""

    tenant = serializers.CharField()
    stage = serializers.CharField(allow_blank=True, help_text="Empty: requests that named none.")
    workflows = serializers.IntegerField(help_text="That had requests of this stage.")
    requests = serializers.IntegerField()
    answered = serializers.IntegerField()
    shared = serializers.IntegerField(help_text="Requests that got a share of their workflow's time.")
    in_share = serializers.IntegerField(help_text="Of `shared`: answered within it.")
    tokens = serializers.IntegerField(help_text="Of prompts and answers.")
    goodput_tokens = serializers.IntegerField(help_text="Of `tokens`: those of workflows that were in time.")


class StageOutput(serializers.Serializer):
    """All stages of the window."""

    since = serializers.DateTimeField()
    until = serializers.DateTimeField()
    items = StageRow(many=True)


class StageGoodputView(ControlView):
    """Goodput by stage. A workflow counts as a whole, so each of its stages has all of its tokens as goodput, or none;
    whether a stage kept to its share of the time shows where a workflow lost it."""

    access: ClassVar = {"GET": SIGNED_IN}

    @operation("goodput_stages", "Goodput by stage", query=StageQuery, answer=StageOutput, errors=LISTED)
    def get(self, request: Request) -> Response:
        query, until = self.query(StageQuery), timezone.now()
        since = until - timedelta(minutes=query["minutes"])
        asked = query.get("tenant", self.tenant_name)
        foreign = self.tenant_name is not None and asked != self.tenant_name
        found = [] if foreign else stage_goodput(since=since, until=until, tenant=asked)
        return Response(StageOutput({"since": since, "until": until, "items": found}).data)
