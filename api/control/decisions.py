"""Decisions of the audit, each with its actor, time, reason and figures. Read-only, newest first."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsViewer
from api.control.framework.base import ControlView, PageQuery, without_page
from api.control.framework.documented import FOUND, operation, page_of
from controller.models import Decision
from controller.selectors.records import decisions


class DecisionQuery(PageQuery):
    """Filters of the list."""

    kind = serializers.CharField(max_length=64, required=False)
    actor = serializers.CharField(max_length=150, required=False)
    actor_type = serializers.ChoiceField(choices=Decision.ActorType.choices, required=False)
    subject_type = serializers.CharField(max_length=32, required=False)
    subject = serializers.CharField(max_length=255, required=False)
    since = serializers.DateTimeField(required=False, help_text="At or after; ISO 8601.")
    until = serializers.DateTimeField(required=False, help_text="Before; ISO 8601.")
    request_id = serializers.CharField(max_length=64, required=False)
    q = serializers.CharField(
        max_length=100, required=False, source="text", help_text="Part of the subject, reason, kind or actor."
    )


class DecisionOutput(serializers.ModelSerializer):
    """A decision with its inputs (for a change: before and after), its outcome and what was rejected."""

    inputs = serializers.DictField()
    outcome = serializers.DictField()
    rejected = serializers.DictField()

    class Meta:
        model = Decision
        fields = (
            "id", "at", "actor_type", "actor", "kind", "subject_type", "subject", "reason", "inputs", "outcome",
            "rejected", "request_id",
        )  # fmt: skip
        read_only_fields = fields


class DecisionList(ControlView):
    """Decisions in the audit, newest first."""

    access: ClassVar = {"GET": IsViewer}

    @operation("decision_list", "List decisions", query=DecisionQuery, answer=page_of(DecisionOutput))
    def get(self, request: Request) -> Response:
        query = self.query(DecisionQuery)
        return self.page(decisions.search(**without_page(query)), decisions.ORDER, DecisionOutput, query)


class DecisionDetail(ControlView):
    """One decision."""

    access: ClassVar = {"GET": IsViewer}

    @operation("decision_get", "Read a decision", answer=DecisionOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(decisions.search(), pk), DecisionOutput)
