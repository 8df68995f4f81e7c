"""Workflows: which keep the one deadline that their requests share, one of them with its requests, and its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET, require_POST

from console.access import actor_of, allows
from console.charts.workflow_timeline import DrawnRequest, timeline
from console.forms.base import WorkflowSearch
from console.forms.numbers import number_of
from console.live.polled import AsOf, PagePart
from console.live.ttl_cache import TtlCache
from console.views.paging import numbered_page
from controller.core.types import given_up
from controller.models import RequestRecord
from controller.selectors.records import decisions
from controller.selectors.records.workflow_stages import due_of, predicted_of, refined_of, stages_of
from controller.selectors.records.workflows import (
    MOST_RECORDS,
    MOST_REQUESTS,
    OneWorkflow,
    RecentWorkflows,
    ReportedTool,
    narrowed,
    parents_of,
    share_of,
    tools_of,
)
from controller.selectors.roles import UserRole
from controller.wording.request_steps import outcome_in_words
from controller.wording.sentences import sentence
from workers import live
from workers.workflow_commands import workflow_cancel
from workers.workflow_reading import all_workflows, find_workflow

PAGE_ROWS = 50
KEPT_S = 2.0
DECISIONS_MAX = 20
MOST_DRAWN = 100  # requests
TENANT_MAX, NAME_MAX = 64, 120  # characters

STALE_S = 5.0
# `number`: of the request whose answer it got, in the order of the page; `tokens`: of the checkpoint.
HOW = {
    "stored_step": "stored answer{number}: no new tokens",
    "shared_call": "answer of an equal request{number}: no new tokens",
    "call_shared": "its call was shared with equal requests",
    "from_checkpoint": "branch, from its checkpoint: {tokens:,} tokens not computed again",
    "sooner_again": "branch, computed again elsewhere, which was sooner",
    "checkpoint_lost": "branch, computed again: its checkpoint was lost",
}
GIVEN_UP = "not counted: its client hung up, and can ask for this step again"

MARKS = {
    "stored_step": "kept",
    "shared_call": "shared",
    "call_shared": "shared",
    "from_checkpoint": "branch",
    "sooner_again": "branch",
    "checkpoint_lost": "branch",
}  # the same in the chart, in a word
SERVED = MARKS.keys() - {"call_shared"}  # that one's own call was computed

READ: TtlCache[RecentWorkflows] = TtlCache(KEPT_S)


@require_GET
@allows(UserRole.VIEWER)
def workflow_list(request: HttpRequest) -> HttpResponse:
    found, now = READ.get(lambda: all_workflows(timezone.now())), timezone.now()
    form = WorkflowSearch(request.GET)
    wanted = form.cleaned_data if form.is_valid() else {}
    rows = narrowed(found, now, tenant=wanted.get("tenant", ""), state=wanted.get("state", "")) if wanted else []
    page = numbered_page(rows, number_of(request.GET.get("page", "")), PAGE_ROWS)
    filters = {name: value for name, value in wanted.items() if value}
    context = {
        "found": found,
        "form": form,
        "page": page,
        "filters": urlencode(filters),
        "rows": [
            {"each": each, "state": each.state(now), "missed": each.missed(now), "left_s": each.left_s(now)}
            for each in page.rows
        ],
        "now": now,
        "most": MOST_RECORDS,
    }
    return render(request, "console/traffic/workflows.html", context)


@require_GET
@allows(UserRole.VIEWER)
def workflow_detail(request: HttpRequest) -> HttpResponse:
    tenant, name = _asked_for(request)
    now = timezone.now()
    found = find_workflow(tenant, name, now) if tenant and name else None
    if found is None:
        return render(request, "console/traffic/workflow_missing.html", {"tenant": tenant, "name": name}, status=404)
    each = found.workflow
    context = _live_context(found, now) | {
        "audited": [(decision, sentence(decision)) for decision in _audited(tenant, name)],
        "cancellable": found.kept is not None and not each.cancelled_by,
    }
    if each.state(now) == "open" or each.running:  # else nothing on the page changes any more
        at = f"{reverse('workflow-live')}?{urlencode({'tenant': tenant, 'workflow': name})}"
        context |= {"as_of": AsOf(time.time(), STALE_S), "live_url": at}
    return render(request, "console/traffic/workflow.html", context)


@gzip_page
@require_GET
@allows(UserRole.VIEWER)
def workflow_live(request: HttpRequest) -> JsonResponse:
    """The part of the page that changes while the workflow is open."""
    tenant, name = _asked_for(request)
    now = timezone.now()
    found = find_workflow(tenant, name, now) if tenant and name else None
    if found is None:
        raise Http404
    html = render_to_string("console/traffic/_workflow_live.html", _live_context(found, now))
    return PagePart(html, AsOf(time.time(), STALE_S)).answer()


def _live_context(found: OneWorkflow, now: datetime) -> dict[str, Any]:
    each, declared = found.workflow, _stages(found)
    numbers = {row.id: number for number, row in enumerate(found.requests, 1)}
    return {
        "each": each,
        "found": found,
        "state": each.state(now),
        "missed": each.missed(now),
        "left_s": each.left_s(now),
        "stages": declared,
        "by_stage": stages_of(found.requests, {stage["name"]: stage["part"] for stage in declared}),
        "goodput": None if each.kept is None else not each.missed(now),
        "rows": [_row(row, numbers) for row in found.requests],
        "served": _served(found.requests),
        "unpredicted": not any(map(predicted_of, found.requests)),
        "timeline": timeline(_steps(found), each.due_at),
        "most_drawn": MOST_DRAWN if len(found.requests) > MOST_DRAWN else None,
        "most": MOST_REQUESTS,
    }


@require_POST
@allows(UserRole.OPERATOR)
def workflow_end(request: HttpRequest) -> HttpResponse:
    """Cancel it: `tenant` and `workflow` in the form."""
    tenant, name = _named(request.POST.get("tenant", "")), _named(request.POST.get("workflow", ""))
    try:
        done = workflow_cancel(actor=actor_of(request), tenant=tenant, workflow=name) if tenant and name else None
    except live.LiveUnavailable:
        messages.error(request, "Redis is unavailable. Check whether the workflow was cancelled once it is available.")
    else:
        if done is None:
            messages.error(request, "Gateways do not know this workflow: it was due more than an hour ago.")
        elif done.decision is None:
            messages.info(request, "The workflow was already cancelled.")
        else:
            at = reverse("decision", args=[done.decision.pk])
            told = '{} cancelled. Its requests end within a second. <a href="{}">View in the audit</a>'
            messages.success(request, format_html(told, name, at))
    return redirect(f"{reverse('workflow')}?{urlencode({'tenant': tenant, 'workflow': name})}")


def _named(given: str) -> str:
    """ "" for what no workflow or tenant is called."""
    return "" if "\x00" in given or len(given) > max(TENANT_MAX, NAME_MAX) else given


def _asked_for(request: HttpRequest) -> tuple[str, str]:
    """(tenant, workflow)"""
    return _named(request.GET.get("tenant", "")), _named(request.GET.get("workflow", ""))


def _served(rows: Sequence[RequestRecord]) -> Counter[str]:
    """How many got an answer that was kept (`kept`) or of an equal request (`shared`), are of a `branch`, or were
    `given_up` by their client, whatever they were besides."""
    found: Counter[str] = Counter()
    for row in rows:
        if given_up(row.step_key, row.error_code):
            found["given_up"] += 1
        else:
            found.update(MARKS[step["reason"]] for step in row.decisions if step.get("reason") in SERVED)
    return found


def _row(row: RequestRecord, numbers: Mapping[str, int]) -> dict[str, Any]:
    share = share_of(row)
    share_s, due_at = share.get("step_s"), due_of(row)
    ended_at = row.arrived_at + timedelta(seconds=row.e2e_s or 0.0)
    return {
        "row": row,
        "due_at": due_at,
        "slack_s": None if due_at is None else (due_at - ended_at).total_seconds(),
        "predicted": predicted_of(row),
        "refined": refined_of(row),
        "outcome": outcome_in_words(row),
        "left_s": share.get("left_s"),
        "share_s": share_s,
        "over_share": share_s is not None and row.e2e_s is not None and row.e2e_s > share_s,
        "how": _how(row, numbers),
    }


def _how(row: RequestRecord, numbers: Mapping[str, int] = MappingProxyType({})) -> list[str]:
    """What was special about how it was served: a kept answer, a call shared with equal requests, a branch. `numbers`:
    of the requests of the page, by their ids."""
    found = []
    for step in row.decisions:
        figures = step.get("figures") or {}
        number = numbers.get(str(figures.get("of_request")))
        named = {"number": f" (request {number})" if number else "", "tokens": figures.get("tokens", 0)}
        found += [HOW[step["reason"]].format(**named)] if step.get("reason") in HOW else []
    return [*found, GIVEN_UP] if given_up(row.step_key, row.error_code) else found


def _steps(found: OneWorkflow) -> list[DrawnRequest]:
    """Requests, and the tool steps that its client reported, by their beginning."""
    rows, tools = found.requests[:MOST_DRAWN], tools_of(found)
    parents = parents_of(found.requests, tools)
    drawn = [_step(row, parents[row.id]) for row in rows]
    drawn += [_tool(tool, parents[tool.key]) for tool in tools]
    return sorted(drawn, key=lambda step: step.arrived_at)


def _tool(tool: ReportedTool, parents: Sequence[str] | None) -> DrawnRequest:
    began, ended = (datetime.fromtimestamp(at, UTC) for at in (tool.began, tool.ended))
    told = f"tool step, took {tool.ended - tool.began:.3g} s"
    return DrawnRequest(tool.key, tool.name, began, ended, None, False, parents, told, is_tool=True)


def _step(row: RequestRecord, parents: Sequence[str] | None) -> DrawnRequest:
    share_s, took_s = share_of(row).get("step_s"), row.e2e_s or 0.0
    words = [outcome_in_words(row), f"took {took_s:.3g} s"]
    words += [f"share {share_s:.3g} s"] if share_s is not None else []
    if (predicted := predicted_of(row)) is not None:
        words.append(f"{row.output_tokens} tokens, predicted {predicted[0]} to {predicted[1]}")
    if (refined := refined_of(row)) is not None:
        words.append(f"after {refined[0]} tokens {refined[1]} to {refined[2]}")
    reasons = [str(step.get("reason")) for step in row.decisions]
    figures = [step.get("figures") or {} for step in row.decisions if step.get("reason") == "shared_call"]
    left = given_up(row.step_key, row.error_code)
    return DrawnRequest(
        row.id,
        row.step_key or row.stage,
        row.arrived_at,
        row.arrived_at + timedelta(seconds=took_s),
        share_s,
        not left and (row.outcome != "ok" or (share_s is not None and took_s > share_s)),
        parents,
        ", ".join([*words, *_how(row)]),
        mark="given up" if left else ", ".join(dict.fromkeys(MARKS[each] for each in reasons if each in MARKS)),
        given_up=left,
        answer_of=next((str(each.get("of_request", "")) for each in figures), ""),
    )


def _stages(found: OneWorkflow) -> list[dict[str, Any]]:
    """As they were declared, each with its part of the whole; empty if none were."""
    stages = [] if found.kept is None else found.kept.stages
    whole = sum(share for _, share in stages)
    return [{"name": name, "part": share / whole} for name, share in stages]


def _audited(tenant: str, name: str) -> list[Any]:
    rows = decisions.search(subject_type="workflow", subject=name)
    return list(rows.filter(inputs__tenant=tenant)[:DECISIONS_MAX])
