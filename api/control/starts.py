"""Startup times of instances, by how they started and where their weights came from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsViewer
from api.control.framework.base import ControlView
from api.control.framework.documented import LISTED, operation
from controller.selectors.fleet.scaling import STARTS_SHOWN, WEIGHTS_FROM, InstanceStart, starts, times_by_way

LIMIT_MAX = 100


class StartsQuery(serializers.Serializer):
    """How many."""

    limit = serializers.IntegerField(
        min_value=1, max_value=LIMIT_MAX, default=STARTS_SHOWN, help_text="The newest instances that are looked at."
    )


class StartRow(serializers.Serializer):
    """One instance. Seconds after the wish; null: not yet, or never."""

    id = serializers.CharField()
    way = serializers.CharField(help_text="Its provisioner, how it began, and where its weights came from.")
    weights = serializers.ChoiceField(
        choices=["", *WEIGHTS_FROM], help_text="Where an action brought them from; empty: it came up with them."
    )
    wished_at = serializers.DateTimeField(
        help_text="Of one that was warm or asleep the scale-out that took it, else when it was created."
    )
    load_s = serializers.FloatField(allow_null=True, help_text="The weights' own way.")
    ready_s = serializers.FloatField(allow_null=True)
    served_s = serializers.FloatField(allow_null=True, help_text="First token of its first request.")
    idle_s = serializers.FloatField(help_text="Of that, the time that it was ready and this request had not come.")
    state = serializers.CharField(help_text="Now, as pages name it.")
    error = serializers.CharField(help_text="What it failed of; empty: nothing is known to be wrong.")


class WayTimesRow(serializers.Serializer):
    """Medians over the starts of one way, seconds after the wish."""

    way = serializers.CharField()
    count = serializers.IntegerField()
    served = serializers.IntegerField(help_text="Of them, those that have given a first token.")
    load_s = serializers.FloatField(allow_null=True)
    ready_s = serializers.FloatField(allow_null=True)
    served_s = serializers.FloatField(
        allow_null=True, help_text="Without the time that a ready instance waited for its first request."
    )
    idle = serializers.IntegerField(help_text="Of those that served, the ones that waited for a request.")


class StartsOutput(serializers.Serializer):
    """The newest instances, newest first, and medians by way."""

    ways = WayTimesRow(many=True)
    items = StartRow(many=True)


class StartsView(ControlView):
    """Time from wish to service."""

    access: ClassVar = {"GET": IsViewer}

    @operation("start_list", "List how new instances came to serve", query=StartsQuery, answer=StartsOutput,
               errors=LISTED)  # fmt: skip
    def get(self, request: Request) -> Response:
        found = starts(self.query(StartsQuery)["limit"])
        answer = {"ways": [asdict(each) for each in times_by_way(found)], "items": [_row(each) for each in found]}
        return Response(StartsOutput(answer).data)


def _row(start: InstanceStart) -> dict[str, Any]:
    known = {**asdict(start), "way": start.way}
    return known | {"weights": start.weights if start.weights in WEIGHTS_FROM else ""}
