"""Requests: search by keyset pages, and one request against its deadlines."""

from __future__ import annotations

from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import allows
from console.forms import RequestSearch
from console.history import NO_CLASS
from console.paging import page_of
from console.sentences import sentence, step
from console.timeline import timeline
from controller.models import RequestRecord
from controller.selectors import decisions
from controller.selectors import requests as records
from controller.selectors.roles import Role

PAGE_ROWS = 50
EXACT = ("id", "tenant", "model", "outcome")
ATTAINED = {"yes": True, "no": False}


@require_GET
@allows(Role.VIEWER)
def request_list(request: HttpRequest) -> HttpResponse:
    form = RequestSearch(request.GET)
    rows = found(form)
    page = page_of(rows, records.ORDER, request.GET.get("after"), PAGE_ROWS)
    filtered = form.is_valid() and any(form.cleaned_data.values())
    context = {"form": form, "rows": page.rows, "next_url": page.next_url(request), "filtered": filtered}
    fragment = request.headers.get("hx-request") == "true"
    return render(request, "console/partials/_request_rows.html" if fragment else "console/requests.html", context)


def found(form: RequestSearch) -> QuerySet[RequestRecord]:
    """An invalid filter finds nothing; the form says why. Long columns are not fetched for a list."""
    if not form.is_valid():
        return RequestRecord.objects.none()
    data = form.cleaned_data
    wanted = {name: data[name] or None for name in EXACT}
    slo_class = "" if data["slo_class"] == NO_CLASS else data["slo_class"] or None
    rows = records.search(
        **wanted,
        slo_class=slo_class,
        attained=ATTAINED.get(data["attained"]),
        since=data["since"],
        until=data["until"],
    )
    return rows.defer("decisions", "token_times")


@require_GET
@allows(Role.VIEWER)
def request_detail(request: HttpRequest, request_id: str) -> HttpResponse:
    row = records.request_record(id=request_id)
    if row is None:
        raise Http404(f"no request {request_id}")
    touched = [(decision, sentence(decision)) for decision in decisions.search(request_id=request_id)[:20]]
    context = {
        "row": row,
        "timeline": timeline(row),
        "steps": [step(recorded) for recorded in row.decisions],
        "touched": touched,
    }
    return render(request, "console/request.html", context)
