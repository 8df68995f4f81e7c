"""Audit: decisions of people and jobs, newest first, by keyset pages; exported with the same filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.exceptions import BadRequest
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.views.decorators.http import require_GET

from console.access import allows
from console.differences import changed_fields
from console.exports import FORMATS, export
from console.figures import figure
from console.forms import AuditSearch
from console.paging import page_of
from console.sentences import sentence
from console.templatetags.units import alternatives
from controller.models import Decision
from controller.selectors import catalogue, decisions
from controller.selectors.roles import Role

PAGE_ROWS = 50
EXACT = ("kind", "actor", "actor_type", "subject_type", "subject")
EXPORTED = (
    "id", "at", "actor_type", "actor", "kind", "subject_type", "subject", "reason", "inputs", "outcome", "rejected",
    "request_id",
)  # fmt: skip


# By kind: the page whose form takes `?restore=`, and where the changed row is looked for (None: it is made again).
UNDONE_AT: dict[str, tuple[str, Callable[[], QuerySet[Any]] | None]] = {
    "slo_class_updated": ("class-edit", catalogue.slo_classes),
    "slo_class_removed": ("class-new", None),
    "priority_mapping_updated": ("mapping-edit", catalogue.priority_mappings),
    "scaling_policy_updated": ("scaling-edit", catalogue.scaling_policies),
}


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
        "filtered": form.is_valid() and any(form.cleaned_data.values()),
        "query": request.GET.urlencode(),
    }
    fragment = request.headers.get("hx-request") == "true"
    return render(request, "console/partials/_audit_rows.html" if fragment else "console/audit.html", context)


def found(form: AuditSearch) -> QuerySet[Decision]:
    """An invalid filter finds nothing; the form says why."""
    if not form.is_valid():
        return Decision.objects.none()
    data = form.cleaned_data
    exact = {name: data[name] or None for name in EXACT}
    return decisions.search(**exact, since=data["since"], until=data["until"], text=data["q"] or None)


@require_GET
@allows(Role.VIEWER)
def decision_export(request: HttpRequest) -> HttpResponseBase:
    """All that the filters find, not one page of it."""
    form, wanted = AuditSearch(request.GET), request.GET.get("format", "csv")
    if wanted not in FORMATS:
        raise BadRequest("format: csv or json")
    if not form.is_valid():
        raise BadRequest(", ".join(f"{name}: {' '.join(errors)}" for name, errors in form.errors.items()))
    return export(found(form), "at", EXPORTED, wanted, "decisions")


@require_GET
@allows(Role.VIEWER)
def decision_detail(request: HttpRequest, decision_id: int) -> HttpResponse:
    decision = get_object_or_404(Decision, pk=decision_id)
    changed = changed_fields(decision.inputs)
    inputs = {name: value for name, value in decision.inputs.items() if not (changed and name in ("before", "after"))}
    sections = [
        ("Figures it was made on", [figure(key, value) for key, value in inputs.items()]),
        ("Outcome", [figure(key, value) for key, value in decision.outcome.items()]),
        ("Rejected", alternatives(decision.rejected)),
    ]
    context = {"decision": decision, "sentence": sentence(decision), "changed": changed, "sections": sections}
    return render(request, "console/decision.html", {**context, "undo": undo_address(decision)})


def undo_address(decision: Decision) -> str:
    """The form with the values before a change, where there is one; "" otherwise, or where the row is gone."""
    page, rows = UNDONE_AT.get(decision.kind, ("", None))
    if not page:
        return ""
    if rows is None:
        return f"{reverse(page)}?restore={decision.pk}"
    row = rows().filter(pk=decision.outcome.get("id")).first()
    return f"{reverse(page, args=[row.pk])}?restore={decision.pk}" if row else ""
