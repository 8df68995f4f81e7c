"""Links between hosts, each in one direction and over one medium."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsAdmin, IsViewer
from api.control.framework.base import ControlView, PageQuery, filtered
from api.control.framework.documented import CREATED, FOUND, MATCHED, PATCHED, operation, page_of
from api.control.framework.fields import NumberField, VersionedOutput, VersionField
from api.control.framework.preconditions import claimed_version, matched_version
from api.control.framework.references import host_named
from controller.models import Link
from controller.selectors.catalogue import links
from controller.services.fleet.topology import link_create, link_remove, link_update

BANDWIDTH_MAX = 1e15
LATENCY_MAX_S = 3600
LOOKUPS = {"source": "source__name", "target": "target__name", "state": "state"}


class LinkQuery(PageQuery):
    """Filters of the list."""

    source = serializers.CharField(max_length=120, required=False, help_text="A host's name.")
    target = serializers.CharField(max_length=120, required=False, help_text="A host's name.")
    state = serializers.ChoiceField(choices=Link.State.choices, required=False)


class _LinkFields(serializers.Serializer):
    bandwidth_bytes_s = NumberField(min_value=1, max_value=BANDWIDTH_MAX)
    latency_s = NumberField(min_value=0, max_value=LATENCY_MAX_S, required=False)
    state = serializers.ChoiceField(choices=Link.State.choices, required=False)


class LinkInput(_LinkFields):
    """A new link; its ends and medium never change."""

    source = serializers.CharField(max_length=120, help_text="A host's name.")
    target = serializers.CharField(
        max_length=120, help_text="A host's name; the same as `source` for the link inside a host."
    )
    medium = serializers.CharField(max_length=32)


class LinkPatch(_LinkFields):
    """A change; absent fields keep their values."""

    version = VersionField()


class LinkOutput(VersionedOutput):
    """A link, and the weight transfers over it in the last day. Bytes a second, seconds."""

    source = serializers.CharField(source="source.name")
    target = serializers.CharField(source="target.name")
    moved = serializers.IntegerField(help_text="Number of weight transfers that succeeded.")
    failed = serializers.IntegerField(help_text="Number of weight transfers that failed.")
    measured_bytes_s = serializers.FloatField(
        allow_null=True,
        help_text="Bandwidth of the newest successful transfer, without the time in which it was held.",
    )
    last_error = serializers.CharField(allow_blank=True, help_text="Error of the newest failed transfer.")

    class Meta:
        model = Link
        fields = (
            "id", "source", "target", "medium", "bandwidth_bytes_s", "latency_s", "state", "moved", "failed",
            "measured_bytes_s", "last_error", "version", "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields


class LinkList(ControlView):
    """All links the caller may see, and new ones."""

    access: ClassVar = {"GET": IsViewer, "POST": IsAdmin}

    @operation("link_list", "List links", query=LinkQuery, answer=page_of(LinkOutput))
    def get(self, request: Request) -> Response:
        query = self.query(LinkQuery)
        rows = filtered(links(), query, LOOKUPS)
        return self.page(rows, ("id",), LinkOutput, query)

    @operation("link_create", "Create a link", body=LinkInput, answer=LinkOutput, status=201, errors=CREATED)
    def post(self, request: Request) -> Response:
        data = self.body(LinkInput)
        for end in ("source", "target"):
            data[end] = host_named(data[end], end)
        row = link_create(actor=self.actor, **data)
        return self.one(self.found(links(), row.pk), LinkOutput, status.HTTP_201_CREATED)


class LinkDetail(ControlView):
    """One link."""

    access: ClassVar = {"GET": IsViewer, "PATCH": IsAdmin, "DELETE": IsAdmin}

    @operation("link_get", "Read a link", answer=LinkOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(links(), pk), LinkOutput)

    @operation("link_update", "Change a link", body=LinkPatch, answer=LinkOutput, errors=PATCHED)
    def patch(self, request: Request, pk: int) -> Response:
        data = self.body(LinkPatch, partial=True)
        version = claimed_version(request, data)
        link_update(actor=self.actor, link_id=pk, version=version, changes=data)
        return self.one(self.found(links(), pk), LinkOutput)

    @operation("link_remove", "Remove a link", status=204, errors=MATCHED)
    def delete(self, request: Request, pk: int) -> Response:
        link_remove(actor=self.actor, link_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
