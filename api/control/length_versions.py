"""Versions of length forests: which is in force for each model, what each was trained on and how it was judged."""

from __future__ import annotations

from typing import Any, ClassVar

from django.utils import timezone
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsViewer
from api.control.framework.base import ControlView
from api.control.framework.documented import LISTED, operation
from api.control.framework.takeovers import TakeoverRow, reporting, rows_of
from controller.core.messages import LENGTHS
from controller.models import LengthVersion
from controller.selectors.records.length_versions import ModelVersions, model_versions


class CoverageAtRow(serializers.Serializer):
    """Of the judged answers longer than `tokens`, asked when so many were out."""

    tokens = serializers.IntegerField()
    answers = serializers.IntegerField()
    coverage = serializers.FloatField(allow_null=True, help_text="0..1; null without answers.")


class LengthVersionRow(serializers.ModelSerializer):
    """One version. Coverage 0..1, pinball loss in tokens; `class_*`: of the constant quantile of each class."""

    coverage_by_tokens = CoverageAtRow(many=True, help_text="Empty for versions that an older release trained.")

    class Meta:
        model = LengthVersion
        fields = (
            "version", "trained_at", "first_at", "last_at", "answers", "cut_answers", "judged", "coverage",
            "class_coverage", "coverage_by_tokens", "pinball", "class_pinball", "refused",
        )  # fmt: skip


class ModelLengthsRow(serializers.Serializer):
    """One served model."""

    model = serializers.CharField()
    in_force = serializers.IntegerField(
        allow_null=True, help_text="Null: lengths are predicted by the mean of their kind."
    )
    recent_answers = serializers.IntegerField(help_text="Recent answers that judged the version in force.")
    recent_coverage = serializers.FloatField(
        allow_null=True, help_text="Share of them that its upper bound covered, 0..1; null without answers."
    )
    gateways = TakeoverRow(
        many=True, allow_null=True, help_text="Null: Redis is unavailable. Those that reported lately, by name."
    )
    versions = LengthVersionRow(
        many=True, help_text="Newest first: the ten newest, and the newest that passed if it is older."
    )


class LengthVersionsOutput(serializers.Serializer):
    """All served models, by name."""

    items = ModelLengthsRow(many=True)


class LengthVersionsView(ControlView):
    """Length forests by model, as under *Answer lengths*."""

    access: ClassVar = {"GET": IsViewer}

    @operation("length_versions", "Versions of length forests", answer=LengthVersionsOutput, errors=LISTED)
    def get(self, request: Request) -> Response:
        now, fleets = timezone.now(), reporting()
        rows = [
            _row(each) | {"gateways": rows_of(fleets, LENGTHS, each.model, each.in_force, now)}
            for each in model_versions(now)
        ]
        return Response(LengthVersionsOutput({"items": rows}).data)


def _row(each: ModelVersions) -> dict[str, Any]:
    return {
        "model": each.model,
        "in_force": None if each.in_force is None else each.in_force.version,
        "recent_answers": each.recent[0],
        "recent_coverage": each.recent_coverage,
        "versions": each.versions,
    }
