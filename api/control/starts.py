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
        min_value=1, max_value=LIMIT_MAX, default=STARTS_SHOWN, help_text="Number of instances, newest first."
    )


class StartRow(serializers.Serializer):
    """One instance. Seconds after the request to start; null: not reached."""

    id = serializers.CharField()
    way = serializers.CharField(help_text="Its provisioner, how it started, and where its weights came from.")
    weights = serializers.ChoiceField(
        choices=["", *WEIGHTS_FROM], help_text="Where its weights were loaded from; empty: it started with them."
    )
    desired_at = serializers.DateTimeField(
        help_text="When the start was requested: the scale-out for a warm or sleeping instance, else its creation."
    )
    load_s = serializers.FloatField(allow_null=True, help_text="Duration of the weight load.")
    ready_s = serializers.FloatField(allow_null=True)
    served_s = serializers.FloatField(allow_null=True, help_text="First token of its first request.")
    idle_s = serializers.FloatField(help_text="Time in which it was ready and had no request, part of `served_s`.")
    state = serializers.CharField(help_text="Current state.")
    error = serializers.CharField(help_text="Why it failed; empty: no known error.")


class WayTimesRow(serializers.Serializer):
    """Medians over starts of one kind, in seconds after the request to start."""

    way = serializers.CharField()
    count = serializers.IntegerField()
    served = serializers.IntegerField(help_text="Starts that have produced a first token.")
    load_s = serializers.FloatField(allow_null=True)
    ready_s = serializers.FloatField(allow_null=True)
    served_s = serializers.FloatField(
        allow_null=True, help_text="Excludes the time that a ready instance waited for its first request."
    )
    idle = serializers.IntegerField(help_text="Instances that were ready before their first request arrived.")


class StartsOutput(serializers.Serializer):
    """The newest instances, and medians by kind of start."""

    ways = WayTimesRow(many=True)
    items = StartRow(many=True)


class StartsView(ControlView):
    """Startup times of new instances, from the request to start until they serve."""

    access: ClassVar = {"GET": IsViewer}

    @operation("start_list", "List startup times of instances", query=StartsQuery, answer=StartsOutput,
               errors=LISTED)  # fmt: skip
    def get(self, request: Request) -> Response:
        found = starts(self.query(StartsQuery)["limit"])
        answer = {"ways": [asdict(each) for each in times_by_way(found)], "items": [_row(each) for each in found]}
        return Response(StartsOutput(answer).data)


def _row(start: InstanceStart) -> dict[str, Any]:
    known = {**asdict(start), "way": start.way}
    return known | {"weights": start.weights if start.weights in WEIGHTS_FROM else ""}
