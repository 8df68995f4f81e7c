"""Weight transfers: attempts to load weights on instances, with size and speed. Newest first."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsViewer
from api.control.framework.base import ControlView, PageQuery, filtered
from api.control.framework.documented import FOUND, operation, page_of
from controller.models import Transfer
from controller.selectors.catalogue import transfers

LOOKUPS = {"action": "action_id", "source": "source", "target": "target", "link": "link_id", "state": "state"}


class TransferQuery(PageQuery):
    """Filters of the list."""

    action = serializers.IntegerField(min_value=1, required=False, help_text="An action's id.")
    source = serializers.CharField(max_length=64, required=False, help_text="An instance's id.")
    target = serializers.CharField(max_length=64, required=False, help_text="An instance's id.")
    link = serializers.IntegerField(min_value=1, required=False, help_text="A link's id.")
    state = serializers.ChoiceField(choices=Transfer.State.choices, required=False)


class TransferOutput(serializers.ModelSerializer):
    """One attempt. Bytes, seconds."""

    action = serializers.IntegerField(source="action_id")
    link = serializers.IntegerField(source="link_id", allow_null=True)
    bytes_s = serializers.FloatField(allow_null=True, help_text="Without the time in which it was held.")

    class Meta:
        model = Transfer
        fields = (
            "id", "action", "source_kind", "source", "target", "link", "attempt", "bytes", "seconds", "bytes_s",
            "flow", "held_s", "flow_level", "state", "error", "recorded_at",
        )  # fmt: skip
        read_only_fields = fields


class TransferList(ControlView):
    """Attempts to load weights, newest first."""

    access: ClassVar = {"GET": IsViewer}

    @operation("transfer_list", "List transfers", query=TransferQuery, answer=page_of(TransferOutput))
    def get(self, request: Request) -> Response:
        query = self.query(TransferQuery)
        return self.page(filtered(transfers(), query, LOOKUPS), ("-id",), TransferOutput, query)


class TransferDetail(ControlView):
    """One transfer."""

    access: ClassVar = {"GET": IsViewer}

    @operation("transfer_get", "Read a transfer", answer=TransferOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(transfers(), pk), TransferOutput)
