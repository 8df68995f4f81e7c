"""KV transfers: attempts to move the KV cache of a request from a prefill to a decode instance. Newest first."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsViewer
from api.control.framework.base import ControlView, PageQuery, without_page
from api.control.framework.documented import FOUND, operation, page_of
from controller.models import KvTransfer
from controller.models.links import OUTCOME_CHOICES, REACHED_CHOICES
from controller.selectors.fleet.links import ORDER, kv_transfers


class KvTransferQuery(PageQuery):
    """Filters of the list."""

    request = serializers.CharField(max_length=64, required=False, help_text="`x-slackline-request-id`.")
    instance = serializers.CharField(max_length=64, required=False, help_text="Id of the instance at either end.")
    source = serializers.CharField(max_length=64, required=False, help_text="The prefill instance.")
    target = serializers.CharField(max_length=64, required=False, help_text="The decode instance.")
    model = serializers.CharField(max_length=120, required=False)
    outcome = serializers.ChoiceField(choices=OUTCOME_CHOICES, required=False)
    state = serializers.ChoiceField(choices=REACHED_CHOICES, required=False, help_text="The last state it reached.")
    reason = serializers.CharField(max_length=64, required=False, help_text="Such as `cut` or `moving_timeout`.")
    since = serializers.DateTimeField(required=False, help_text="Started at or after this time; ISO 8601.")
    until = serializers.DateTimeField(required=False, help_text="Started before this time; ISO 8601.")


class KvTransferOutput(serializers.ModelSerializer):
    """One attempt to transfer KV, stored when its request ends. Bytes, tokens, seconds; null: not measured."""

    bytes_s = serializers.FloatField(allow_null=True, help_text="Without the time in which it was held.")

    class Meta:
        model = KvTransfer
        fields = (
            "id", "started_at", "request", "attempt", "model", "source", "target", "outcome", "state", "reason",
            "error", "bytes", "layers", "tokens", "cached", "seconds", "bytes_s", "overlap_s", "measured_by",
            "held_s", "flow",
        )  # fmt: skip
        read_only_fields = fields


class KvTransferList(ControlView):
    """All KV transfers, newest first."""

    access: ClassVar = {"GET": IsViewer}

    @operation("kv_transfer_list", "List KV transfers", query=KvTransferQuery, answer=page_of(KvTransferOutput))
    def get(self, request: Request) -> Response:
        query = self.query(KvTransferQuery)
        return self.page(kv_transfers(**without_page(query)), ORDER, KvTransferOutput, query)


class KvTransferDetail(ControlView):
    """One KV transfer."""

    access: ClassVar = {"GET": IsViewer}

    @operation("kv_transfer_get", "Read a KV transfer", answer=KvTransferOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(kv_transfers(), pk), KvTransferOutput)
