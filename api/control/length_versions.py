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
from controller.models import LengthVersion
from controller.selectors.records.length_versions import ModelVersions, model_versions


class LengthVersionRow(serializers.ModelSerializer):
    """One version. Coverage 0..1, pinball loss in tokens; `class_*`: of the constant quantile of each class."""

    class Meta:
        model = LengthVersion
        fields = (
            "version", "trained_at", "first_at", "last_at", "answers", "cut_answers", "judged", "coverage",
            "class_coverage", "pinball", "class_pinball", "refused",
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
    versions = LengthVersionRow(many=True, help_text="Newest first, at most ten.")


class LengthVersionsOutput(serializers.Serializer):
    """All served models, by name."""

    items = ModelLengthsRow(many=True)


class LengthVersionsView(ControlView):
    """Length forests by model, as under *Answer lengths*."""

    access: ClassVar = {"GET": IsViewer}

    @operation("length_versions", "Versions of length forests", answer=LengthVersionsOutput, errors=LISTED)
    def get(self, request: Request) -> Response:
        rows = [_row(each) for each in model_versions(timezone.now())]
        return Response(LengthVersionsOutput({"items": rows}).data)


def _row(each: ModelVersions) -> dict[str, Any]:
    return {
        "model": each.model,
        "in_force": None if each.in_force is None else each.in_force.version,
        "recent_answers": each.recent[0],
        "recent_coverage": each.recent_coverage,
        "versions": each.versions,
    }
