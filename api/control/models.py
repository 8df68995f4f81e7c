"""Served models: what clients may name in `model`, and what is known about it."""

from __future__ import annotations

from rest_framework import serializers

from api.control.base import PageQuery
from api.control.fields import NameField, VersionField
from controller.models import ServedModel

ALIASES_MAX = 20
CONTEXT_MAX = 10_000_000


class ServedModelQuery(PageQuery):
    """Filters of the list."""

    name = serializers.CharField(max_length=120, required=False)


class _ServedModelFields(serializers.Serializer):
    aliases = serializers.ListField(child=NameField(max_length=120), max_length=ALIASES_MAX, required=False)
    context_tokens = serializers.IntegerField(min_value=1, max_value=CONTEXT_MAX, required=False)
    chars_per_token = serializers.FloatField(
        min_value=0.1, max_value=100, required=False, help_text="Estimate where no tokenizer is configured."
    )
    tokenizer = serializers.CharField(max_length=255, allow_null=True, required=False)


class ServedModelInput(_ServedModelFields):
    """A new model; its name never changes."""

    name = NameField(max_length=120)


class ServedModelPatch(_ServedModelFields):
    """A change; what is absent stays."""

    version = VersionField()


class ServedModelOutput(serializers.ModelSerializer):
    """A model as stored."""

    aliases = serializers.ListField(child=serializers.CharField())

    class Meta:
        model = ServedModel
        fields = (
            "id", "name", "aliases", "context_tokens", "chars_per_token", "tokenizer", "version", "created_at",
            "updated_at",
        )  # fmt: skip
        read_only_fields = fields
