"""How a class, a mapping or a scaling policy came to be as it is: its changes, newest first, with diff and way back."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.views.decorators.http import require_GET

from console.access import allows
from console.differences import changed_fields
from console.paging import page_of
from controller.models import Decision
from controller.selectors import catalogue, decisions
from controller.selectors.roles import Role

PAGE_ROWS = 50
MOST_DIGITS = 18  # of a decision's number
SCALING_CHANGES = ("scaling_policy_created", "scaling_policy_updated")


@require_GET
@allows(Role.VIEWER)
def class_history(request: HttpRequest, class_id: int) -> HttpResponse:
    row = get_object_or_404(catalogue.slo_classes(), pk=class_id)
    context = {"title": row.name, "back": "classes", "back_name": "SLO classes", "edit": "class-edit"}
    return history(request, row, changes_of("slo_class", row), context)


@require_GET
@allows(Role.VIEWER)
def mapping_history(request: HttpRequest, mapping_id: int) -> HttpResponse:
    row = get_object_or_404(catalogue.priority_mappings(), pk=mapping_id)
    owner = row.tenant.name if row.tenant else "all tenants"
    context = {"title": f"Mapping of {owner}", "back": "mappings", "back_name": "Priority mapping"}
    return history(request, row, changes_of("priority_mapping", row), {**context, "edit": "mapping-edit"})


@require_GET
@allows(Role.VIEWER)
def scaling_history(request: HttpRequest, policy_id: int) -> HttpResponse:
    row = get_object_or_404(catalogue.scaling_policies(), pk=policy_id)
    context = {"title": f"Scaling of {row.model.name}, {row.role}", "back": "scaling", "back_name": "Scaling"}
    # Its name holds its limits, and what the scaler decides has it as its subject too: by kind and number.
    rows = decisions.search(subject_type="scaling_policy").filter(kind__in=SCALING_CHANGES, outcome__id=row.pk)
    return history(request, row, rows, {**context, "edit": "scaling-edit"})


def changes_of(kind: str, row: Any) -> QuerySet[Decision]:
    """By the row's number too: a tenant's class and the common one may share their name."""
    return decisions.search(subject_type=kind, subject=str(row)).filter(outcome__id=row.pk)


def before_of(request: HttpRequest, subject_type: str, row: Any = None) -> dict[str, Any]:
    """Values before the recorded change that `?restore=` names, to undo it. `row`: a change of that one alone."""
    wanted = request.GET.get("restore", "")
    if not (wanted.isascii() and wanted.isdigit()) or len(wanted) > MOST_DIGITS:
        return {}
    found = Decision.objects.filter(pk=wanted, subject_type=subject_type)
    decision = (found if row is None else found.filter(outcome__id=row.pk)).first()
    return dict(decision.inputs.get("before", {})) if decision else {}


def history(request: HttpRequest, row: Any, rows: QuerySet[Decision], context: dict[str, Any]) -> HttpResponse:
    page = page_of(rows, decisions.ORDER, request.GET.get("after"), PAGE_ROWS)
    edit = reverse(context["edit"], args=[row.pk])
    changes = [
        {
            "decision": decision,
            "what": decision.kind.rsplit("_", 1)[-1],
            "fields": [each for each in changed_fields(decision.inputs) if each.kind != "same"],
            "undo": f"{edit}?restore={decision.pk}" if decision.kind.endswith("_updated") else "",
        }
        for decision in page.rows
    ]
    whole = {**context, "row": row, "edit_url": edit, "changes": changes, "next_url": page.next_url(request)}
    return render(request, "console/changes.html", whole)
