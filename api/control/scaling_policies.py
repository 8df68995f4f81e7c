"""Scaling policies: how many instances of a model and role there may be, and when to change that (Alg. 3)."""

from __future__ import annotations

from rest_framework import serializers

from api.control.base import PageQuery
from api.control.fields import VersionField
from controller.models import ScalingPolicy
from controller.models.fleet import Role

INSTANCES_MAX = 1000
LOAD_MAX = 100
SECONDS_MAX = 86_400


class ScalingPolicyQuery(PageQuery):
    """Filters of the list."""

    model = serializers.CharField(max_length=120, required=False, help_text="A model's name.")
    enabled = serializers.BooleanField(required=False, allow_null=True, default=None)


class _ScalingFields(serializers.Serializer):
    min_instances = serializers.IntegerField(min_value=0, max_value=INSTANCES_MAX, required=False)
    max_instances = serializers.IntegerField(min_value=1, max_value=INSTANCES_MAX, required=False)
    scale_out_above = serializers.FloatField(
        min_value=0, max_value=LOAD_MAX, required=False, help_text="Load; 1.0 is a fleet exactly full."
    )
    scale_in_below = serializers.FloatField(min_value=0, max_value=LOAD_MAX, required=False)
    sustain_s = serializers.FloatField(
        min_value=0, max_value=SECONDS_MAX, required=False, help_text="Load must stay low for this long."
    )
    cooldown_s = serializers.FloatField(
        min_value=0, max_value=SECONDS_MAX, required=False, help_text="Pause after an action."
    )
    interval_s = serializers.FloatField(
        min_value=0.1, max_value=60, required=False, help_text="Time between two looks."
    )
    enabled = serializers.BooleanField(required=False)


class ScalingPolicyInput(_ScalingFields):
    """A new policy; its model and role never change."""

    model = serializers.CharField(max_length=120, help_text="A model's name.")
    role = serializers.ChoiceField(choices=Role.choices, required=False)


class ScalingPolicyPatch(_ScalingFields):
    """A change; what is absent stays."""

    version = VersionField()


class ScalingPolicyOutput(serializers.ModelSerializer):
    """A policy as stored. Seconds."""

    model = serializers.CharField(source="model.name")

    class Meta:
        model = ScalingPolicy
        fields = (
            "id", "model", "role", "min_instances", "max_instances", "scale_out_above", "scale_in_below", "sustain_s",
            "cooldown_s", "interval_s", "enabled", "version", "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields
