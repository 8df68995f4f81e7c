"""Hosts: machines that carry devices and instances."""

from __future__ import annotations

from rest_framework import serializers

from api.control.base import PageQuery
from api.control.fields import LabelsField, NameField, VersionField
from controller.models import Host


class HostQuery(PageQuery):
    """Filters of the list."""

    name = serializers.CharField(max_length=120, required=False)
    zone = serializers.CharField(max_length=64, required=False)


class _HostFields(serializers.Serializer):
    zone = serializers.CharField(max_length=64, allow_blank=True, required=False)
    labels = LabelsField(required=False)


class HostInput(_HostFields):
    """A new host; its name never changes."""

    name = NameField(max_length=120)


class HostPatch(_HostFields):
    """A change; what is absent stays."""

    version = VersionField()


class HostOutput(serializers.ModelSerializer):
    """A host as stored."""

    labels = LabelsField()

    class Meta:
        model = Host
        fields = ("id", "name", "zone", "labels", "version", "created_at", "updated_at")
        read_only_fields = fields
