"""Finished requests as the gateways recorded them. Read-only, newest first; a tenant's key sees its own."""

from __future__ import annotations

from typing import ClassVar

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.framework.base import SIGNED_IN, ControlView, PageQuery, without_page
from api.control.framework.documented import FOUND, operation, page_of
from controller.core.types import Outcome
from controller.models import RequestRecord
from controller.selectors.records import requests
from controller.slo.request_types import RequestType, request_type

TYPES = [each.value for each in RequestType]


class RequestQuery(PageQuery):
    """Filters of the list."""

    id = serializers.CharField(max_length=64, required=False, help_text="`x-slackline-request-id`.")
    tenant = serializers.CharField(max_length=64, required=False)
    slo_class = serializers.CharField(
        max_length=64, required=False, allow_blank=True, help_text="Empty: requests without a class."
    )
    model = serializers.CharField(max_length=120, required=False)
    instance = serializers.CharField(
        max_length=64, required=False, help_text="Id of an instance that prefilled or decoded the request."
    )
    outcome = serializers.ChoiceField(choices=[outcome.value for outcome in Outcome], required=False)
    type = serializers.ChoiceField(
        choices=TYPES, required=False, help_text="What it asked for; `compound`: it belongs to a workflow."
    )
    attained = serializers.BooleanField(required=False, allow_null=True, default=None)
    since = serializers.DateTimeField(required=False, help_text="Arrived at or after; ISO 8601.")
    until = serializers.DateTimeField(required=False, help_text="Arrived before; ISO 8601.")


SUMMARY = (
    "id", "arrived_at", "tenant", "slo_class", "model", "priority", "instance", "outcome", "error_code", "http_status",
    "streamed", "judged_by", "prompt_tokens", "output_tokens", "target_ttft_s", "target_tpot_s", "target_deadline_s",
    "waiting_time_s", "queue_s", "ttft_s", "tpot_s", "e2e_s", "ttft_met", "tpot_met", "deadline_met", "attained",
    "goodput_tokens", "attempts", "workflow", "stage", "prefill_instance", "may_defer", "stands_for",
    "last_arrived_at", "all_prompt_tokens", "target_thinking_s", "first_answer_s", "reasoning_tokens",
    "step_key", "parents",
)  # fmt: skip


class RequestSummary(serializers.ModelSerializer):
    """One row of the list. Durations in seconds; null: not measured.

    Refusals beyond ten a second for the same tenant, class, model and reason are one row: `stands_for` requests that
    arrived from `arrived_at` to `last_arrived_at` with `all_prompt_tokens` together. Its other fields are those of one
    of them.
    """

    class Meta:
        model = RequestRecord
        fields = SUMMARY
        read_only_fields = fields


class RequestOutput(serializers.ModelSerializer):
    """One request with the decisions taken for it and the times of its tokens, in seconds after arrival."""

    type = serializers.SerializerMethodField()
    decisions = serializers.ListField(child=serializers.DictField())
    token_times = serializers.ListField(child=serializers.FloatField())
    length_bounds = serializers.ListField(
        child=serializers.IntegerField(),
        help_text="Lower and upper bound of the answer's tokens, as predicted at its arrival; empty: there were none.",
    )

    refined_bounds = serializers.ListField(
        child=serializers.IntegerField(),
        allow_null=True,
        help_text=(
            "The last prediction made while the answer was generated (one every 50 tokens), as three numbers: tokens "
            "generated so far, lower bound, upper bound. Null: no further prediction was made."
        ),
    )

    class Meta:
        model = RequestRecord
        fields = (*SUMMARY, "type", "decisions", "token_times", "length_bounds", "refined_bounds", "length_version")
        read_only_fields = fields

    @extend_schema_field(serializers.ChoiceField(choices=TYPES))
    def get_type(self, row: RequestRecord) -> str:
        """What the request asked for."""
        return request_type(row.workflow, row.target_deadline_s, row.decisions).value


class _RequestsView(ControlView):
    access: ClassVar = {"GET": SIGNED_IN}

    def narrowed(self, rows: QuerySet[RequestRecord]) -> QuerySet[RequestRecord]:
        return rows if self.tenant_name is None else rows.filter(tenant=self.tenant_name)


class RequestList(_RequestsView):
    """Finished requests, newest first."""

    @operation("request_list", "List finished requests", query=RequestQuery, answer=page_of(RequestSummary))
    def get(self, request: Request) -> Response:
        query = self.query(RequestQuery)
        rows = self.narrowed(requests.search(**without_page(query)))
        short = rows.defer("decisions", "token_times", "length_features", "length_bounds", "refined_bounds")
        return self.page(short, requests.ORDER, RequestSummary, query)


class RequestDetail(_RequestsView):
    """One finished request."""

    @operation("request_get", "Read a finished request", answer=RequestOutput, errors=FOUND)
    def get(self, request: Request, pk: str) -> Response:
        return self.one(self.found(self.narrowed(requests.search()), pk), RequestOutput)
