"""Workflows that have ended, each with its result: in time, missed, or cancelled. A tenant's key sees its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from django.utils import timezone
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.framework.base import SIGNED_IN, ControlView, PageQuery
from api.control.framework.documented import LISTED, operation, page_of
from controller.models import WorkflowResult
from controller.selectors.records.goodput import RESULTS, RESULTS_ORDER, result_of, workflow_results

DEFAULT_SPAN = timedelta(days=1)


class WorkflowResultQuery(PageQuery):
    """Filters of the list."""

    tenant = serializers.CharField(max_length=64, required=False)
    workflow_id = serializers.CharField(
        max_length=120, required=False, trim_whitespace=False, help_text="A name can be used again: all that had it."
    )
    slo_class = serializers.CharField(
        max_length=64, required=False, allow_blank=True, help_text="Of its first request; empty: without a class."
    )
    result = serializers.ChoiceField(choices=RESULTS, required=False)
    since = serializers.DateTimeField(
        required=False, help_text="Ended at or after; ISO 8601. Without it: the 24 hours before `until`."
    )
    until = serializers.DateTimeField(required=False, help_text="Ended before; ISO 8601. Without it: now.")


class WorkflowResultRow(serializers.ModelSerializer):
    """One workflow, all or nothing. Seconds."""

    workflow_id = serializers.CharField(source="workflow")
    result = serializers.SerializerMethodField()
    slo_class = serializers.CharField(help_text="Of its first request; empty: without a class.")
    ends_at = serializers.DateTimeField(
        help_text="When it counts: when it is due or was cancelled; without a deadline the end of its last request."
    )
    due_at = serializers.DateTimeField(allow_null=True, help_text="Null: without a deadline.")
    ended_at = serializers.DateTimeField(
        help_text="The end of its last request; if it was cancelled before its first one, `cancelled_at`."
    )
    late_s = serializers.FloatField(
        allow_null=True, help_text="From `due_at` to `ended_at`; negative: before it. Null: without a deadline."
    )
    requests = serializers.IntegerField(help_text="Requests that have ended.")
    failed = serializers.IntegerField(help_text="Of them those that were not answered.")
    missed = serializers.IntegerField(help_text="Of them those that missed their own targets, without cancelled ones.")
    tokens = serializers.IntegerField(help_text="Of all prompts and answers; goodput if it was in time.")
    cancelled_by = serializers.CharField(help_text="`tenant`, `operator` or empty.")
    cancelled_at = serializers.DateTimeField(
        allow_null=True, help_text="At or after `due_at`, it changes nothing. Null: not cancelled, or not known."
    )

    class Meta:
        model = WorkflowResult
        fields = (
            "tenant", "workflow_id", "slo_class", "result", "began_at", "ended_at", "due_at", "ends_at", "late_s",
            "requests", "failed", "missed", "tokens", "cancelled_by", "cancelled_at",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(serializers.ChoiceField(choices=RESULTS))
    def get_result(self, row: WorkflowResult) -> str:
        """`cancelled`: by its client before it was due, so it does not count. One that an operator cancelled was
        missed."""
        return result_of(row)


class WorkflowResultList(ControlView):
    """Workflows that have ended, the last one first."""

    access: ClassVar = {"GET": SIGNED_IN}

    @operation(
        "workflow_result_list", "List results of workflows", query=WorkflowResultQuery,
        answer=page_of(WorkflowResultRow), errors=LISTED,
    )  # fmt: skip
    def get(self, request: Request) -> Response:
        query = self.query(WorkflowResultQuery)
        asked = query.get("tenant", self.tenant_name)
        if self.tenant_name not in (None, asked):
            return Response({"items": [], "next_cursor": None})
        until = query.get("until") or timezone.now()
        wanted: dict[str, Any] = {name: query.get(name) for name in ("slo_class", "result")}
        rows = workflow_results(
            since=query.get("since") or until - DEFAULT_SPAN, until=until, tenant=asked,
            workflow=query.get("workflow_id"), **wanted,
        )  # fmt: skip
        return self.page(rows, RESULTS_ORDER, WorkflowResultRow, query)
