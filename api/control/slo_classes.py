"""SLO classes: what a request of this class is promised, and how many of them must get it."""

from __future__ import annotations

from rest_framework import serializers

from api.control.base import PageQuery
from api.control.fields import NameField, SecondsField, VersionField
from controller.models import SLOClass

VALUE_MAX = 1_000_000


class SLOClassQuery(PageQuery):
    """Filters of the list."""

    name = serializers.CharField(max_length=64, required=False)
    tenant = serializers.CharField(
        max_length=64, required=False, allow_blank=True, help_text="A tenant's name; empty: the shared classes."
    )


class _SLOClassFields(serializers.Serializer):
    title = serializers.CharField(max_length=120, allow_blank=True, required=False)
    ttft_s = SecondsField(help_text="Time to the first token.")
    tpot_s = SecondsField(help_text="Time per output token.")
    deadline_s = SecondsField(allow_null=True, required=False, help_text="End to end; null: none.")
    waiting_time_s = SecondsField(required=False, help_text="Dropped if not sent to an engine by then.")
    target = serializers.FloatField(
        min_value=0.000_001, max_value=1, required=False, help_text="Share of requests that must attain their SLO."
    )
    value = serializers.FloatField(
        min_value=0.000_001, max_value=VALUE_MAX, required=False, help_text="Worth of one attained request."
    )
    may_defer = serializers.BooleanField(required=False)


class SLOClassInput(_SLOClassFields):
    """A new class. Its name and tenant never change."""

    name = NameField(max_length=64)
    tenant = serializers.CharField(
        max_length=64, allow_null=True, required=False, help_text="Owner's name; null: for all tenants."
    )


class SLOClassPatch(_SLOClassFields):
    """A change; what is absent stays."""

    version = VersionField()


class SLOClassOutput(serializers.ModelSerializer):
    """A class as stored. Seconds."""

    tenant = serializers.CharField(source="tenant.name", allow_null=True, default=None)

    class Meta:
        model = SLOClass
        fields = (
            "id", "tenant", "name", "title", "ttft_s", "tpot_s", "deadline_s", "waiting_time_s", "target", "value",
            "may_defer", "version", "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields
