"""Devices: the accelerators of a host, or its processor."""

from __future__ import annotations

from rest_framework import serializers

from api.control.base import PageQuery
from api.control.fields import VersionField
from controller.models import Device

INDEX_MAX = 32_767
BYTES_MAX = 2**50


class DeviceQuery(PageQuery):
    """Filters of the list."""

    host = serializers.CharField(max_length=120, required=False, help_text="A host's name.")
    kind = serializers.CharField(max_length=64, required=False)


class DeviceInput(serializers.Serializer):
    """A new device; its host and index never change."""

    host = serializers.CharField(max_length=120, help_text="A host's name.")
    index = serializers.IntegerField(min_value=0, max_value=INDEX_MAX)
    kind = serializers.CharField(max_length=64)
    memory_bytes = serializers.IntegerField(min_value=1, max_value=BYTES_MAX)


class DevicePatch(serializers.Serializer):
    """A change; what is absent stays."""

    kind = serializers.CharField(max_length=64)
    memory_bytes = serializers.IntegerField(min_value=1, max_value=BYTES_MAX)
    version = VersionField()


class DeviceOutput(serializers.ModelSerializer):
    """A device as stored."""

    host = serializers.CharField(source="host.name")

    class Meta:
        model = Device
        fields = ("id", "host", "index", "kind", "memory_bytes", "version", "created_at", "updated_at")
        read_only_fields = fields
