"""Tenants: who sends requests, with which quota, and which class where a request names none."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.base import SIGNED_IN, ControlView, PageQuery, actor_of, claimed_version, page_of
from api.control.fields import NameField, VersionField
from api.errors import ErrorOutput
from api.permissions import IsAdmin
from controller.models import Tenant

QUOTA_MAX = 2**31 - 1


class TenantQuery(PageQuery):
    """Filters of the list."""

    name = serializers.CharField(max_length=64, required=False)
    state = serializers.ChoiceField(choices=Tenant.State.choices, required=False)


class _TenantChange(serializers.Serializer):
    title = serializers.CharField(max_length=120, allow_blank=True, required=False)
    default_class = serializers.CharField(
        max_length=64, allow_null=True, required=False, help_text="Name of the tenant's own class or of a shared one."
    )
    weight = serializers.FloatField(min_value=0.001, max_value=1000, required=False)
    rpm = serializers.IntegerField(
        min_value=1, max_value=QUOTA_MAX, allow_null=True, required=False, help_text="Requests a minute; null: no limit."
    )
    tpm = serializers.IntegerField(
        min_value=1, max_value=QUOTA_MAX, allow_null=True, required=False, help_text="Tokens a minute; null: no limit."
    )
    max_concurrency = serializers.IntegerField(min_value=1, max_value=QUOTA_MAX, allow_null=True, required=False)


class TenantInput(_TenantChange):
    """A new tenant; its name never changes."""

    name = NameField(max_length=64)


class TenantPatch(_TenantChange):
    """A change; what is absent stays."""

    state = serializers.ChoiceField(choices=Tenant.State.choices, required=False)
    version = VersionField()


class TenantOutput(serializers.ModelSerializer):
    """A tenant as stored."""

    default_class = serializers.CharField(source="default_class.name", allow_null=True, default=None)

    class Meta:
        model = Tenant
        fields = (
            "id", "name", "title", "default_class", "weight", "rpm", "tpm", "max_concurrency", "state", "version",
            "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields
