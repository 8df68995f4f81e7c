"""Audit: decisions of people and jobs, newest first, by keyset pages."""

from __future__ import annotations

import json
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET

from console.access import allows
from console.forms import AuditSearch
from console.paging import page_of
from console.sentences import sentence
from controller.models import Decision
from controller.selectors import decisions
from controller.selectors.roles import Role

PAGE_ROWS = 50


@require_GET
@allows(Role.VIEWER)
def decision_list(request: HttpRequest) -> HttpResponse:
    form = AuditSearch(request.GET)
    page = page_of(found(form), decisions.ORDER, request.GET.get("after"), PAGE_ROWS)
    rows = [(decision, sentence(decision)) for decision in page.rows]
    context = {
        "form": form,
        "rows": rows,
        "next_url": page.next_url(request),
        "filtered": any(form.cleaned_data.values()),
    }
    fragment = request.headers.get("hx-request") == "true"
    return render(request, "console/partials/_audit_rows.html" if fragment else "console/audit.html", context)


def found(form: AuditSearch) -> QuerySet[Decision]:
    """An invalid filter finds nothing; the form says why."""
    if not form.is_valid():
        return Decision.objects.none()
    data = form.cleaned_data
    return decisions.search(kind=data["kind"] or None, actor=data["actor"] or None, text=data["q"] or None)


@require_GET
@allows(Role.VIEWER)
def decision_detail(request: HttpRequest, decision_id: int) -> HttpResponse:
    decision = get_object_or_404(Decision, pk=decision_id)
    sections = [
        ("Figures it was made on", plain(decision.inputs)),
        ("Outcome", plain(decision.outcome)),
        ("Rejected", plain(decision.rejected)),
    ]
    context = {"decision": decision, "sentence": sentence(decision), "sections": sections}
    return render(request, "console/decision.html", context)


def plain(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values as text; nested objects as JSON."""
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values.items()]
