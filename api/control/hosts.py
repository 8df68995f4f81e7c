"""Hosts: machines with devices and instances."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsAdmin, IsViewer
from api.control.framework.base import ControlView, PageQuery, filtered
from api.control.framework.documented import CREATED, FOUND, MATCHED, PATCHED, operation, page_of
from api.control.framework.fields import LabelsField, NameField, VersionedOutput, VersionField
from api.control.framework.preconditions import claimed_version, matched_version
from controller.models import Host
from controller.selectors.catalogue import hosts
from controller.services.fleet.topology import host_create, host_remove, host_update


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
    """A change; absent fields keep their values."""

    version = VersionField()


class HostOutput(VersionedOutput):
    """A host."""

    labels = LabelsField()

    class Meta:
        model = Host
        fields = ("id", "name", "zone", "labels", "version", "created_at", "updated_at")
        read_only_fields = fields


class HostList(ControlView):
    """All hosts the caller may see, and new ones."""

    access: ClassVar = {"GET": IsViewer, "POST": IsAdmin}

    @operation("host_list", "List hosts", query=HostQuery, answer=page_of(HostOutput))
    def get(self, request: Request) -> Response:
        query = self.query(HostQuery)
        rows = filtered(hosts(), query, {"name": "name", "zone": "zone"})
        return self.page(rows, ("name",), HostOutput, query)

    @operation("host_create", "Create a host", body=HostInput, answer=HostOutput, status=201, errors=CREATED)
    def post(self, request: Request) -> Response:
        data = self.body(HostInput)
        row = host_create(actor=self.actor, **data)
        return self.one(row, HostOutput, status.HTTP_201_CREATED)


class HostDetail(ControlView):
    """One host."""

    access: ClassVar = {"GET": IsViewer, "PATCH": IsAdmin, "DELETE": IsAdmin}

    @operation("host_get", "Read a host", answer=HostOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(hosts(), pk), HostOutput)

    @operation("host_update", "Change a host", body=HostPatch, answer=HostOutput, errors=PATCHED)
    def patch(self, request: Request, pk: int) -> Response:
        data = self.body(HostPatch, partial=True)
        version = claimed_version(request, data)
        row = host_update(actor=self.actor, host_id=pk, version=version, changes=data)
        return self.one(row, HostOutput)

    @operation("host_remove", "Remove a host", status=204, errors=MATCHED)
    def delete(self, request: Request, pk: int) -> Response:
        host_remove(actor=self.actor, host_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
