"""Links between instances, as reported by their engines. Read-only: they follow the fleet."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsViewer
from api.control.framework.base import ControlView, PageQuery, filtered
from api.control.framework.documented import FOUND, operation, page_of
from controller.models import InstanceLink
from controller.models.links import STATES
from controller.selectors.fleet.links import instance_links

LOOKUPS = {"source": "source", "target": "target", "model": "model", "state": "state", "link": "link_id"}


class InstanceLinkQuery(PageQuery):
    """Filters of the list."""

    instance = serializers.CharField(max_length=64, required=False, help_text="Id of the instance at either end.")
    source = serializers.CharField(max_length=64, required=False, help_text="An instance's id.")
    target = serializers.CharField(max_length=64, required=False, help_text="An instance's id.")
    model = serializers.CharField(max_length=120, required=False)
    state = serializers.ChoiceField(choices=STATES, required=False)
    link = serializers.IntegerField(min_value=1, required=False, help_text="Id of the link between their hosts.")
    open = serializers.BooleanField(
        required=False, default=True, help_text="False: links closed because an instance left."
    )


class InstanceLinkOutput(serializers.ModelSerializer):
    """A link over which `target` pulls KV from `source`. Bytes, bytes per second, seconds; null: not measured."""

    link = serializers.IntegerField(source="link_id", allow_null=True)

    class Meta:
        model = InstanceLink
        fields = (
            "id", "source", "target", "model", "link", "state", "since", "bandwidth_bytes_s", "latency_s", "bytes",
            "transfers", "failures", "last_error", "error_at", "created_at", "observed_at", "closed_at",
        )  # fmt: skip
        read_only_fields = fields


class InstanceLinkList(ControlView):
    """All links between instances, in order of creation."""

    access: ClassVar = {"GET": IsViewer}

    @operation(
        "instance_link_list",
        "List links between instances",
        query=InstanceLinkQuery,
        answer=page_of(InstanceLinkOutput),
    )
    def get(self, request: Request) -> Response:
        query = self.query(InstanceLinkQuery)
        rows = instance_links(open=query["open"], instance=query.get("instance"))
        return self.page(filtered(rows, query, LOOKUPS), ("id",), InstanceLinkOutput, query)


class InstanceLinkDetail(ControlView):
    """One link between instances."""

    access: ClassVar = {"GET": IsViewer}

    @operation("instance_link_get", "Read a link between instances", answer=InstanceLinkOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(instance_links(open=None), pk), InstanceLinkOutput)
