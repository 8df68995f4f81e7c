"""Devices: the accelerators of a host, or its CPU."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsAdmin, IsViewer
from api.control.framework.base import ControlView, PageQuery, filtered
from api.control.framework.documented import CREATED, FOUND, MATCHED, PATCHED, operation, page_of
from api.control.framework.fields import VersionedOutput, VersionField
from api.control.framework.preconditions import claimed_version, matched_version
from api.control.framework.references import host_named
from controller.models import Device
from controller.selectors.catalogue import devices
from controller.services.fleet.topology import device_create, device_remove, device_update

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
    """A change; absent fields keep their values."""

    kind = serializers.CharField(max_length=64)
    memory_bytes = serializers.IntegerField(min_value=1, max_value=BYTES_MAX)
    version = VersionField()


class DeviceOutput(VersionedOutput):
    """A device."""

    host = serializers.CharField(source="host.name")

    class Meta:
        model = Device
        fields = ("id", "host", "index", "kind", "memory_bytes", "version", "created_at", "updated_at")
        read_only_fields = fields


class DeviceList(ControlView):
    """All devices the caller may see, and new ones."""

    access: ClassVar = {"GET": IsViewer, "POST": IsAdmin}

    @operation("device_list", "List devices", query=DeviceQuery, answer=page_of(DeviceOutput))
    def get(self, request: Request) -> Response:
        query = self.query(DeviceQuery)
        rows = filtered(devices(), query, {"host": "host__name", "kind": "kind"})
        return self.page(rows, ("id",), DeviceOutput, query)

    @operation("device_create", "Create a device", body=DeviceInput, answer=DeviceOutput, status=201, errors=CREATED)
    def post(self, request: Request) -> Response:
        data = self.body(DeviceInput)
        data["host"] = host_named(data["host"], "host")
        row = device_create(actor=self.actor, **data)
        return self.one(row, DeviceOutput, status.HTTP_201_CREATED)


class DeviceDetail(ControlView):
    """One device."""

    access: ClassVar = {"GET": IsViewer, "PATCH": IsAdmin, "DELETE": IsAdmin}

    @operation("device_get", "Read a device", answer=DeviceOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(devices(), pk), DeviceOutput)

    @operation("device_update", "Change a device", body=DevicePatch, answer=DeviceOutput, errors=PATCHED)
    def patch(self, request: Request, pk: int) -> Response:
        data = self.body(DevicePatch, partial=True)
        version = claimed_version(request, data)
        row = device_update(actor=self.actor, device_id=pk, version=version, changes=data)
        return self.one(row, DeviceOutput)

    @operation("device_remove", "Remove a device", status=204, errors=MATCHED)
    def delete(self, request: Request, pk: int) -> Response:
        device_remove(actor=self.actor, device_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
