"""Links: one direction between two hosts over one medium."""

from __future__ import annotations

from rest_framework import serializers

from api.control.base import PageQuery
from api.control.fields import VersionField
from controller.models import Link

BANDWIDTH_MAX = 1e15
LATENCY_MAX_S = 3600


class LinkQuery(PageQuery):
    """Filters of the list."""

    source = serializers.CharField(max_length=120, required=False, help_text="A host's name.")
    target = serializers.CharField(max_length=120, required=False, help_text="A host's name.")
    state = serializers.ChoiceField(choices=Link.State.choices, required=False)


class _LinkFields(serializers.Serializer):
    bandwidth_bytes_s = serializers.FloatField(min_value=1, max_value=BANDWIDTH_MAX)
    latency_s = serializers.FloatField(min_value=0, max_value=LATENCY_MAX_S, required=False)
    state = serializers.ChoiceField(choices=Link.State.choices, required=False)


class LinkInput(_LinkFields):
    """A new link; its ends and medium never change."""

    source = serializers.CharField(max_length=120, help_text="A host's name.")
    target = serializers.CharField(max_length=120, help_text="A host's name; the source itself for a link inside it.")
    medium = serializers.CharField(max_length=32)


class LinkPatch(_LinkFields):
    """A change; what is absent stays."""

    version = VersionField()


class LinkOutput(serializers.ModelSerializer):
    """A link as stored. Bytes a second, seconds."""

    source = serializers.CharField(source="source.name")
    target = serializers.CharField(source="target.name")

    class Meta:
        model = Link
        fields = (
            "id", "source", "target", "medium", "bandwidth_bytes_s", "latency_s", "state", "version", "created_at",
            "updated_at",
        )  # fmt: skip
        read_only_fields = fields
