"""Requests: search with keyset pages, the timeline of one request, and two requests compared."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import allows
from console.forms.base import RequestSearch
from console.panels.context import around
from console.panels.history import NO_CLASS
from console.panels.timeline import span_s, timeline
from console.views.paging import page_of
from console.wording.attained import COUNTED_SEPARATELY
from controller.core.types import ENGINE_REJECTED
from controller.models import Decision, RequestRecord
from controller.selectors.records import decisions
from controller.selectors.records import requests as records
from controller.selectors.records.workflow_stages import refined_of
from controller.selectors.roles import UserRole
from controller.slo.request_types import request_type
from controller.wording.misses import why_missed
from controller.wording.request_steps import outcome_in_words, step
from controller.wording.sentences import sentence
from controller.wording.values import REQUEST_TYPES

PAGE_ROWS = 50
AUDITED_MAX = 20
COMMANDS = ("queue_cancel", "queue_pause", "queue_resume", "queue_reprioritise")
RECORDED_WITHIN = timedelta(minutes=2)  # a command on thousands of requests is recorded when it has finished
EXACT = ("id", "tenant", "model", "instance", "workflow", "type", "outcome")
ATTAINED = {"yes": True, "no": False}
# Label, field and unit ("s": seconds, "n": a count, "": shown as stored) of the rows of a comparison.
COMPARED = (
    ("Tenant", "tenant", ""),
    ("Class", "slo_class", ""),
    ("Model", "model", ""),
    ("Instance", "instance", ""),
    ("Prefill instance", "prefill_instance", ""),
    ("Outcome", "outcome", ""),
    ("Queue", "queue_s", "s"),
    ("TTFT", "ttft_s", "s"),
    ("TTFT target", "target_ttft_s", "s"),
    ("TPOT", "tpot_s", "s"),
    ("TPOT target", "target_tpot_s", "s"),
    ("End to end", "e2e_s", "s"),
    ("Deadline", "target_deadline_s", "s"),
    ("First answer token", "first_answer_s", "s"),
    ("Thinking deadline", "target_thinking_s", "s"),
    ("Reasoning tokens", "reasoning_tokens", "n"),
    ("Prompt tokens", "prompt_tokens", "n"),
    ("Output tokens", "output_tokens", "n"),
    ("Tokens in time", "goodput_tokens", "n"),
    ("Priority", "priority", "n"),
    ("Attempts", "attempts", "n"),
    ("Requests it stands for", "stands_for", "n"),
)


@require_GET
@allows(UserRole.VIEWER)
def request_list(request: HttpRequest) -> HttpResponse:
    form = RequestSearch(request.GET)
    rows = found(form)
    page = page_of(rows, records.ORDER, request.GET.get("after"), PAGE_ROWS)
    filtered = form.is_valid() and any(form.cleaned_data.values())
    context = {"form": form, "rows": page.rows, "next_url": page.next_url(request), "filtered": filtered}
    fragment = request.headers.get("hx-request") == "true"
    return render(
        request, "console/traffic/_request_rows.html" if fragment else "console/traffic/requests.html", context
    )


def found(form: RequestSearch) -> QuerySet[RequestRecord]:
    """Nothing for an invalid form, which shows its errors. A list does not fetch the long columns."""
    if not form.is_valid():
        return RequestRecord.objects.none()
    data = form.cleaned_data
    wanted = {name: data[name] or None for name in EXACT}
    until = data["until"]
    if data["model"] and not data["id"]:
        bound = records.until_model(data["model"])
        if bound is None:
            return RequestRecord.objects.none()
        until = min(bound, until or bound)
    slo_class = "" if data["slo_class"] == NO_CLASS else data["slo_class"] or None
    rows = records.search(
        **wanted,
        slo_class=slo_class,
        attained=ATTAINED.get(data["attained"]),
        since=data["since"],
        until=until,
    )
    if data["attained"] == "no":
        rows = rows.exclude(COUNTED_SEPARATELY)
    return rows.defer("decisions", "token_times")


@require_GET
@allows(UserRole.VIEWER)
def request_detail(request: HttpRequest, request_id: str) -> HttpResponse:
    row = records.request_record(id=request_id)
    if row is None:
        missing = {"id": request_id, "kept_days": settings.RECORDS_KEPT_DAYS}
        return render(request, "console/traffic/request_missing.html", missing, status=404)
    rejected = row.error_code == ENGINE_REJECTED
    whole = described(row) | {
        "around": around(row),
        "missed": why_missed(row),
        "rejected": rejected,
        "outcome": outcome_in_words(row),
        "type": REQUEST_TYPES[request_type(row.workflow, row.target_deadline_s, row.decisions).value],
        "refined": refined_of(row),
        "ended_at": None if row.e2e_s is None else row.arrived_at + timedelta(seconds=row.e2e_s),
    }
    return render(request, "console/traffic/request.html", {"whole": whole})


@require_GET
@allows(UserRole.VIEWER)
def request_compare(request: HttpRequest) -> HttpResponse:
    """Two requests on one scale: `?id=A&id=B`, or `?id=A&with=attained` for an attained one of its class."""
    ids = [each.strip() for each in request.GET.getlist("id") if each.strip()]
    if len(ids) == 1 and request.GET.get("with") == "attained":
        ids += [other.id for other in [attained_like(stored(ids[0]))] if other]
    context: dict[str, Any] = {"ids": [*ids, "", ""][:2], "asked": len(ids)}
    if len(ids) == 2:
        rows = [stored(each) for each in ids]
        whole_s = max(span_s(row) for row in rows)
        context["pair"] = [described(row, whole_s) for row in rows]
        context["figures"] = compared(*rows)
    return render(request, "console/traffic/compare.html", context, status=200 if len(ids) in (0, 2) else 422)


def stored(request_id: str) -> RequestRecord:
    row = records.request_record(id=request_id)
    if row is None:
        raise Http404(f"request {request_id} not found")
    return row


def attained_like(row: RequestRecord) -> RequestRecord | None:
    """The newest earlier request of the same tenant, class and model that attained its SLO, else the first later one:
    the first requests of a class may all have missed."""
    like = partial(records.search, tenant=row.tenant, slo_class=row.slo_class, model=row.model, attained=True)
    return like(until=row.arrived_at).first() or like(since=row.arrived_at).exclude(pk=row.pk).last()


def described(row: RequestRecord, whole_s: float | None = None) -> dict[str, Any]:
    audited = [(decision, sentence(decision)) for decision in decisions_on(row)]
    steps = [step(recorded) for recorded in row.decisions]
    return {"row": row, "timeline": timeline(row, whole_s), "steps": steps, "audited": audited}


def decisions_on(row: RequestRecord) -> list[Decision]:
    """Decisions about this request, and queue commands on several requests that included it: found by the recorded ids,
    or by the command that the request's own record names."""
    until = row.arrived_at + timedelta(seconds=row.e2e_s or 0.0) + RECORDED_WITHIN
    included = Q(inputs__request_ids__contains=[row.id])
    figures = [recorded.get("figures") or {} for recorded in row.decisions]
    for command in {str(each["command"]) for each in figures if "command" in each}:
        included |= Q(outcome__commands__contains=[command])
    rows = decisions.search(since=row.arrived_at, until=until)
    return list(rows.filter(Q(request_id=row.id) | Q(included, kind__in=COMMANDS, request_id=""))[:AUDITED_MAX])


def compared(first: RequestRecord, second: RequestRecord) -> list[dict[str, Any]]:
    """The rows of a comparison; `differs` marks rows whose values are not the same."""
    rows = []
    for label, name, unit in COMPARED:
        values = getattr(first, name), getattr(second, name)
        delta = values[1] - values[0] if unit == "s" and None not in values else None
        rows.append({"label": label, "unit": unit, "values": values, "delta": delta, "differs": values[0] != values[1]})
    return rows
