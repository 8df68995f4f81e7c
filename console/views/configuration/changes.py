"""History of an SLO class, a priority mapping, a scaling policy, a launch template or the flow settings: the changes,
newest first, each with a revert."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET

from console.access import allows
from console.forms.numbers import number_of
from console.views.paging import page_of
from controller.models import Decision
from controller.selectors import catalogue
from controller.selectors.records import decisions
from controller.selectors.records.removals import removal
from controller.selectors.roles import UserRole, role_of
from controller.wording.changes import changed_fields

PAGE_ROWS = 50
SCALING_CHANGES = ("scaling_policy_created", "scaling_policy_updated")


@require_GET
@allows(UserRole.VIEWER)
def class_history(request: HttpRequest, class_id: int) -> HttpResponse:
    context = {"back": "classes", "back_name": "SLO classes", "edit": "class-edit", "again": "class-new"}
    row = catalogue.slo_classes().filter(pk=class_id).first()
    if row is None:
        return history_of_removed(request, "slo_class", class_id, context)
    context["title"] = row.name
    return history(request, row, changes_of("slo_class", row), context)


@require_GET
@allows(UserRole.VIEWER)
def mapping_history(request: HttpRequest, mapping_id: int) -> HttpResponse:
    context = {"back": "mappings", "back_name": "Priority mapping", "edit": "mapping-edit"}
    row = catalogue.priority_mappings().filter(pk=mapping_id).first()
    if row is None:
        return history_of_removed(request, "priority_mapping", mapping_id, context)
    context["title"] = f"the priority mapping of {row.tenant.name if row.tenant else 'all tenants'}"
    return history(request, row, changes_of("priority_mapping", row), context)


@require_GET
@allows(UserRole.VIEWER)
def scaling_history(request: HttpRequest, policy_id: int) -> HttpResponse:
    context = {"back": "scaling", "back_name": "Scaling", "edit": "scaling-edit"}
    row = catalogue.scaling_policies().filter(pk=policy_id).first()
    if row is None:
        return history_of_removed(request, "scaling_policy", policy_id, context)
    context["title"] = f"the scaling policy of {row.model.name}, {row.role}"
    # Not changes_of: the policy's text contains its limits, and decisions of the scaler have it as their subject too.
    rows = decisions.search(subject_type="scaling_policy").filter(kind__in=SCALING_CHANGES, outcome__id=row.pk)
    return history(request, row, rows, context)


@require_GET
@allows(UserRole.VIEWER)
def flow_settings_history(request: HttpRequest) -> HttpResponse:
    """Of the one row; empty until it is first saved."""
    row = catalogue.flow_settings().first()
    context = {
        "back": "flows",
        "back_name": "Flows",
        "edit_url": reverse("flow-settings"),
        "title": "the flow settings",
    }
    return history(request, row, decisions.search(subject_type="flow_settings"), context)


@require_GET
@allows(UserRole.VIEWER)
def template_history(request: HttpRequest, template_id: int) -> HttpResponse:
    context: dict[str, Any] = {"back": "launch-templates", "back_name": "Launch templates"}
    if role_of(request.user) >= UserRole.ADMIN:
        context |= {"edit": "launch-template-edit", "again": "launch-template-new"}
    row = catalogue.launch_templates().filter(pk=template_id).first()
    if row is None:
        return history_of_removed(request, "launch_template", template_id, context)
    context["title"] = row.name
    return history(request, row, changes_of("launch_template", row), context)


def history_of_removed(request: HttpRequest, kind: str, pk: int, context: dict[str, Any]) -> HttpResponse:
    """History of a removed row. Raises Http404 if no removal of that id is recorded."""
    found = removal(kind, pk)
    if found is None:
        raise Http404(f"no {kind} {pk}")
    kinds = [f"{kind}_{what}" for what in ("created", "updated", "removed")]
    rows = decisions.search(subject_type=kind).filter(kind__in=kinds, outcome__id=pk)
    return history(request, None, rows, {**context, "title": found.name})


def changes_of(kind: str, row: Any) -> QuerySet[Decision]:
    """Filtered by id too: a tenant's own class and the shared one may have the same name."""
    return decisions.search(subject_type=kind, subject=str(row)).filter(outcome__id=row.pk)


def before_of(request: HttpRequest, subject_type: str, row: Any = None) -> dict[str, Any]:
    """Values before the change named by `?restore=`, to revert it. With `row`, only a change of that row counts."""
    wanted = number_of(request.GET.get("restore", ""))
    if wanted is None:
        return {}
    found = Decision.objects.filter(pk=wanted, subject_type=subject_type)
    decision = (found if row is None else found.filter(outcome__id=row.pk)).first()
    return dict(decision.inputs.get("before", {})) if decision else {}


def history(request: HttpRequest, row: Any, rows: QuerySet[Decision], context: dict[str, Any]) -> HttpResponse:
    """`row` None: it was removed; it can be created again if there is a form for it."""
    page = page_of(rows, decisions.ORDER, request.GET.get("after"), PAGE_ROWS)
    edit = context.get("edit_url", "")
    if row is not None and "edit" in context:
        edit = reverse(context["edit"], args=[row.pk])
    again = reverse(context["again"]) if row is None and "again" in context else ""
    changes = [
        {
            "decision": decision,
            "what": decision.kind.rsplit("_", 1)[-1],
            "fields": [each for each in changed_fields(decision.inputs) if each.kind != "same"],
            "revert_url": f"{edit}?restore={decision.pk}" if edit and decision.kind.endswith("_updated") else "",
            "again_url": f"{again}?restore={decision.pk}" if again and decision.kind.endswith("_removed") else "",
        }
        for decision in page.rows
    ]
    whole = {**context, "row": row, "edit_url": edit, "changes": changes, "next_url": page.next_url(request)}
    return render(request, "console/configuration/changes.html", whole)
