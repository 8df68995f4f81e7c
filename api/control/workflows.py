"""Workflows with requests in the last hour, and those that are open. A tenant's key sees its own."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from django.utils import timezone
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsOperator
from api.control.framework.base import SIGNED_IN, ControlView, PageQuery
from api.control.framework.documented import FOUND, LISTED, operation, page_of
from api.control.framework.errors import LiveDataUnavailable
from api.control.framework.pagination import InvalidCursor
from controller.core.types import Outcome
from controller.models import RequestRecord
from controller.postgres.waiting import give_back_connection
from controller.selectors.records.workflows import STATES, ReportedTool, Workflow, narrowed, share_of, tools_of
from workers import live
from workers.workflow_commands import workflow_cancel
from workers.workflow_reading import all_workflows, find_workflow

NAME_MAX = 120
TENANT_MAX = 64


class WorkflowQuery(PageQuery):
    """Filters of the list."""

    tenant = serializers.CharField(max_length=TENANT_MAX, required=False)
    state = serializers.ChoiceField(choices=STATES, required=False)


class WorkflowName(serializers.Serializer):
    """Which workflow. Ids belong to tenants."""

    tenant = serializers.CharField(max_length=TENANT_MAX)
    workflow_id = serializers.CharField(max_length=NAME_MAX, trim_whitespace=False)


class WorkflowOfKey(WorkflowName):
    """Which workflow."""

    tenant = serializers.CharField(
        max_length=TENANT_MAX, required=False, help_text="Required unless a tenant's key calls."
    )


class WorkflowRow(serializers.Serializer):
    """One workflow. Seconds. Its requests: those that arrived in the last hour."""

    tenant = serializers.CharField()
    workflow_id = serializers.CharField()
    state = serializers.ChoiceField(choices=STATES)
    began_at = serializers.DateTimeField(help_text="When it began; without a deadline its first request that is known.")
    due_at = serializers.DateTimeField(allow_null=True)
    left_s = serializers.FloatField(allow_null=True, help_text="Negative: it is late.")
    requests = serializers.IntegerField(help_text="Requests that have ended.")
    failed = serializers.IntegerField(help_text="Of them those that were not answered.")
    running = serializers.IntegerField(help_text="Requests whose end is not known; 0 while Redis is unavailable.")
    output_tokens = serializers.IntegerField(help_text="Of all answers.")
    in_time = serializers.BooleanField(
        allow_null=True,
        help_text="All or nothing; so far, while it is open. Null without a deadline, or if its client cancelled it "
        "before it was due.",
    )
    stages = serializers.ListField(child=serializers.CharField(), help_text="As its requests named them, in order.")
    cancelled_by = serializers.CharField(help_text="`tenant`, `operator` or empty.")


class RequestOfWorkflow(serializers.Serializer):
    """A request of a workflow. Seconds; null: not known."""

    id = serializers.CharField()
    arrived_at = serializers.DateTimeField()
    stage = serializers.CharField()
    outcome = serializers.ChoiceField(choices=[outcome.value for outcome in Outcome])
    left_s = serializers.FloatField(allow_null=True, help_text="What the workflow had left at its arrival.")
    share_s = serializers.FloatField(allow_null=True, help_text="What it got of that.")
    took_s = serializers.FloatField(allow_null=True)
    output_tokens = serializers.IntegerField()
    step_key = serializers.CharField(help_text="As its client named it, or empty.")
    parents = serializers.ListField(
        child=serializers.CharField(),
        allow_null=True,
        help_text="Step keys or request ids that its client said it depends on. Null: it did not say.",
    )


class ToolStepOfWorkflow(serializers.Serializer):
    """A tool step that the client reported. Seconds."""

    key = serializers.CharField()
    name = serializers.CharField()
    began_at = serializers.DateTimeField()
    took_s = serializers.FloatField()
    parents = serializers.ListField(child=serializers.CharField(), allow_null=True)


class WorkflowWithRequests(WorkflowRow):
    """One workflow with its requests that have ended, in order of arrival, at most 500."""

    items = RequestOfWorkflow(many=True)
    tool_steps = ToolStepOfWorkflow(many=True)
    more = serializers.BooleanField(help_text="There are more requests than `items`.")


class WorkflowCancelOutput(serializers.Serializer):
    """What came of it."""

    cancelled_by = serializers.CharField(help_text="`tenant` or `operator`, whoever was first.")
    running = serializers.IntegerField(help_text="Requests whose end was not known when it was cancelled.")
    decision = serializers.IntegerField(
        allow_null=True, help_text="Id of the audit record; null: it was cancelled before."
    )


class WorkflowList(ControlView):
    """Workflows with requests in the last hour, and those that are open, newest first."""

    access: ClassVar = {"GET": SIGNED_IN}

    @operation("workflow_list", "List workflows", query=WorkflowQuery, answer=page_of(WorkflowRow), errors=LISTED)
    def get(self, request: Request) -> Response:
        query, now = self.query(WorkflowQuery), timezone.now()
        if self.tenant_name is not None and query.get("tenant", self.tenant_name) != self.tenant_name:
            return Response({"items": [], "next_cursor": None})
        found = all_workflows(now, self.tenant_name or query.get("tenant"))
        rows = narrowed(found, now, state=query.get("state", ""))
        shown, cursor = _page(rows, query["limit"], query.get("cursor"))
        items = WorkflowRow([_row(each, now) for each in shown], many=True).data
        return Response({"items": items, "next_cursor": cursor})


class WorkflowDetail(ControlView):
    """One workflow with its requests."""

    access: ClassVar = {"GET": SIGNED_IN}

    @operation("workflow_get", "Read a workflow", query=WorkflowOfKey, answer=WorkflowWithRequests,
               errors=(400, *FOUND))  # fmt: skip
    def get(self, request: Request) -> Response:
        query, now = self.query(WorkflowOfKey), timezone.now()
        tenant = query.get("tenant") or self.tenant_name
        if tenant is None:
            raise serializers.ValidationError({"tenant": ["This field is required."]})
        if self.tenant_name not in (None, tenant):
            raise NotFound("Not found.")
        found = find_workflow(tenant, query["workflow_id"], now)
        if found is None:
            raise NotFound("Not found.")
        whole = _row(found.workflow, now) | {
            "items": map(_request, found.requests),
            "tool_steps": map(_tool, tools_of(found)),
            "more": found.more,
        }
        return Response(WorkflowWithRequests(whole).data)


class WorkflowCancel(ControlView):
    """End a workflow's requests, queued or running, at every gateway within a quarter of a second, and have later ones
    refused. Their clients get 499 `cancelled`. It cannot be undone."""

    access: ClassVar = {"POST": IsOperator}
    configures = False

    @operation("workflow_cancel", "Cancel a workflow", body=WorkflowName, answer=WorkflowCancelOutput,
               errors=(400, *FOUND))  # fmt: skip
    def post(self, request: Request) -> Response:
        data = self.body(WorkflowName)
        give_back_connection()
        try:
            done = workflow_cancel(actor=self.actor, tenant=data["tenant"], workflow=data["workflow_id"])
        except live.LiveUnavailable as error:
            raise LiveDataUnavailable("Redis is unavailable. The workflow may have been cancelled.") from error
        if done is None:
            raise NotFound("Gateways keep no such workflow: it has no deadline, or was due more than an hour ago.")
        state, decision = done
        answer = {
            "cancelled_by": state.cancelled_by,
            "running": state.running,
            "decision": None if decision is None else decision.pk,
        }
        return Response(WorkflowCancelOutput(answer).data)


def _row(each: Workflow, now: datetime) -> dict[str, Any]:
    return {
        "tenant": each.tenant,
        "workflow_id": each.name,
        "state": each.state(now),
        "began_at": each.began_at,
        "due_at": each.due_at,
        "left_s": each.left_s(now),
        "requests": each.requests,
        "failed": each.failed,
        "running": each.running,
        "output_tokens": each.output_tokens,
        "in_time": None if each.kept is None else not each.missed(now),
        "stages": each.stages,
        "cancelled_by": each.cancelled_by,
    }


def _request(row: RequestRecord) -> dict[str, Any]:
    share = share_of(row)
    return {
        "id": row.id,
        "arrived_at": row.arrived_at,
        "stage": row.stage,
        "outcome": row.outcome,
        "left_s": share.get("left_s"),
        "share_s": share.get("step_s"),
        "took_s": row.e2e_s,
        "output_tokens": row.output_tokens,
        "step_key": row.step_key,
        "parents": row.parents,
    }


def _tool(tool: ReportedTool) -> dict[str, Any]:
    began_at = datetime.fromtimestamp(tool.began, UTC)
    shown = {"key": tool.key, "name": tool.name, "began_at": began_at, "took_s": tool.ended - tool.began}
    return shown | {"parents": tool.parents}


def _key(each: Workflow) -> tuple[float, str, str]:
    return each.began_at.timestamp(), each.tenant, each.name


def _page(rows: Sequence[Workflow], limit: int, cursor: str | None) -> tuple[Sequence[Workflow], str | None]:
    """The cursor holds the key of the last row, so that new workflows do not shift pages."""
    if cursor:
        after = _decoded(cursor)
        rows = [each for each in rows if _key(each) < after]
    shown = rows[:limit]
    if len(rows) <= limit:
        return shown, None
    return shown, base64.urlsafe_b64encode(json.dumps(_key(shown[-1])).encode()).decode().rstrip("=")


def _decoded(cursor: str) -> tuple[float, str, str]:
    try:
        began, tenant, name = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidCursor from error
    if isinstance(began, bool) or not isinstance(began, int | float):
        raise InvalidCursor
    if not isinstance(tenant, str) or not isinstance(name, str):
        raise InvalidCursor
    return float(began), tenant, name
