"""Priority mappings: how a bare priority becomes SLO targets (HyperFlexis sec. 5.2). At most one a tenant."""

from __future__ import annotations

from rest_framework import serializers

from api.control.base import PageQuery
from api.control.fields import SecondsField, VersionField
from controller.models import PriorityMapping
from controller.slo.mapping import CONTENTION_RULES

LEVELS_MAX = 16


class PriorityMappingQuery(PageQuery):
    """Filters of the list."""

    tenant = serializers.CharField(
        max_length=64, required=False, allow_blank=True, help_text="A tenant's name; empty: the shared mapping."
    )


class LevelField(serializers.Serializer):
    """One priority level: its targets before there is history, and the range they may move in."""

    ttft_s = SecondsField()
    tpot_s = SecondsField()
    ttft_min_s = SecondsField()
    ttft_max_s = SecondsField()
    tpot_min_s = SecondsField()
    tpot_max_s = SecondsField()


class _MappingFields(serializers.Serializer):
    levels = serializers.ListField(
        child=LevelField(), min_length=1, max_length=LEVELS_MAX, help_text="Level 0 is the most urgent."
    )
    window = serializers.IntegerField(min_value=1, max_value=100_000, required=False)
    window_age_s = SecondsField(required=False)
    contention = serializers.ChoiceField(choices=CONTENTION_RULES, required=False)


class PriorityMappingInput(_MappingFields):
    """A new mapping; its tenant never changes."""

    tenant = serializers.CharField(
        max_length=64, allow_null=True, required=False, help_text="Owner's name; null: for all tenants."
    )


class PriorityMappingPatch(_MappingFields):
    """A change; what is absent stays."""

    version = VersionField()


class PriorityMappingOutput(serializers.ModelSerializer):
    """A mapping as stored."""

    tenant = serializers.CharField(source="tenant.name", allow_null=True, default=None)
    levels = serializers.ListField(child=LevelField())

    class Meta:
        model = PriorityMapping
        fields = (
            "id", "tenant", "levels", "window", "window_age_s", "contention", "version", "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields
