"""Audit: decisions of people and background jobs, newest first, with keyset pages; exports use the same filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

from django.core.exceptions import BadRequest
from django.db.models import Count, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase, QueryDict, StreamingHttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET

from console.access import allows
from console.forms.base import AuditSearch
from console.panels.audit_groups import entries
from console.panels.context import leads, sentence_for
from console.panels.decision_links import linked_figures
from console.panels.history import NO_CLASS
from console.panels.scale_outs import ways_of
from console.templatetags.units import alternatives
from console.views.paging import page_of
from console.views.site.problems import problem
from controller.models import Decision, ScalingPolicy
from controller.selectors import catalogue
from controller.selectors.exports import csv_lines, json_lines
from controller.selectors.records import decisions
from controller.selectors.records.causes import ClassTraffic, bearing_on, in_force, looked_back_to, traffic
from controller.selectors.roles import UserRole
from controller.wording.changes import changed_fields
from controller.wording.sentences import sentence

PAGE_ROWS = 50
EXPORTS_AT_ONCE = 2  # of one person in a process: each asks the database for page after page
EXPORTING: Counter[int] = Counter()  # by the person's id
FORMATS = {"csv": ("text/csv; charset=utf-8", csv_lines), "json": ("application/json", json_lines)}
SIDES = ("before", "after", "names")  # of a change, shown as rows
EXACT = ("kind", "actor", "actor_type", "subject_type", "subject")
EXPORTED = (
    "id", "at", "actor_type", "actor", "kind", "subject_type", "subject", "reason", "inputs", "outcome", "rejected",
    "request_id",
)  # fmt: skip


# By kind: the page whose form takes `?restore=`, and the query set of the changed row (None: it is created again).
REVERTED_AT: dict[str, tuple[str, Callable[[], QuerySet[Any]] | None]] = {
    "slo_class_updated": ("class-edit", catalogue.slo_classes),
    "slo_class_removed": ("class-new", None),
    "priority_mapping_updated": ("mapping-edit", catalogue.priority_mappings),
    "scaling_policy_updated": ("scaling-edit", catalogue.scaling_policies),
}


@require_GET
@allows(UserRole.VIEWER)
def decision_list(request: HttpRequest) -> HttpResponse:
    form = AuditSearch(request.GET)
    if form.is_valid() and (whose := class_filter(form)) and not form.cleaned_data["since"]:
        return redirect(f"{request.path}?{since_first_miss(request.GET, *whose, form.cleaned_data['until'])}")
    about = traffic_of(form)
    page = page_of(found(form, about), decisions.ORDER, request.GET.get("after"), PAGE_ROWS)
    rows = [(decision, sentence_for(decision, about.keys if about else ())) for decision in page.rows]
    context = {
        "about": about,
        **(affecting_context(request, form, about) if about and not request.GET.get("after") else {}),
        "form": form,
        "rows": rows,
        "entries": entries(rows),
        "next_url": page.next_url(request),
        "filtered": form.is_valid() and any(form.cleaned_data.values()),
        "query": request.GET.urlencode(),
    }
    fragment = request.headers.get("hx-request") == "true"
    return render(request, "console/audit/_audit_rows.html" if fragment else "console/audit/audit.html", context)


def found(form: AuditSearch, about: ClassTraffic | None = None) -> QuerySet[Decision]:
    """Nothing for an invalid form, which shows its errors."""
    if not form.is_valid():
        return Decision.objects.none()
    data = form.cleaned_data
    exact = {name: data[name] or None for name in EXACT}
    bearing = bearing_on(about) if about else None
    return decisions.search(**exact, since=data["since"], until=data["until"], text=data["q"] or None, bearing=bearing)


def class_filter(form: AuditSearch) -> tuple[str | None, str | None] | None:
    """The tenant and class whose misses are to be explained, or None if the search names neither."""
    tenant, slo_class = form.cleaned_data["tenant"] or None, form.cleaned_data["slo_class"] or None
    return (tenant, "" if slo_class == NO_CLASS else slo_class) if tenant or slo_class else None


def traffic_of(form: AuditSearch) -> ClassTraffic | None:
    if not form.is_valid() or (whose := class_filter(form)) is None:
        return None
    data = form.cleaned_data
    until = data["until"] or timezone.now()
    return traffic(tenant=whose[0], slo_class=whose[1], since=data["since"], until=until)


def since_first_miss(query: QueryDict, tenant: str | None, slo_class: str | None, until: datetime | None) -> str:
    """The query with a start time added, so that its URL shows the same decisions tomorrow."""
    since = looked_back_to(tenant=tenant, slo_class=slo_class, until=until or timezone.now())
    bounded = query.copy()
    bounded["since"] = since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M")
    return bounded.urlencode()


def affecting_context(request: HttpRequest, form: AuditSearch, about: ClassTraffic) -> dict[str, Any]:
    """The scalers' last decisions before the list begins, still in force then, and the number of decisions by kind."""
    counts = found(form, about).order_by("kind").values_list("kind").annotate(count=Count("pk"))
    query = request.GET.copy()
    kinds = []
    for kind, count in counts:
        query["kind"] = kind
        kinds.append((kind, count, f"{request.path}?{query.urlencode()}"))
    before = in_force(about.models, form.cleaned_data["since"])
    return {"kinds": kinds, "in_force": [(each, sentence(each)) for each in before]}


@require_GET
@allows(UserRole.VIEWER)
def decision_export(request: HttpRequest) -> HttpResponseBase:
    """Every decision that matches the filters, not just one page."""
    form, wanted = AuditSearch(request.GET), request.GET.get("format", "csv")
    if wanted not in FORMATS:
        raise BadRequest("format: must be csv or json")
    if not form.is_valid():
        raise BadRequest(", ".join(f"{name}: {' '.join(map(str, errors))}" for name, errors in form.errors.items()))
    person = int(request.user.pk or 0)
    if EXPORTING[person] >= EXPORTS_AT_ONCE:
        text = f"{EXPORTS_AT_ONCE} exports of yours are being downloaded. Wait until one of them has ended."
        return problem(request, 429, "Too many exports", text, signed_in=True)
    kind, lines = FORMATS[wanted]
    file = f"decisions-{timezone.now():%Y%m%d-%H%M%S}.{wanted}"
    rows = found(form, traffic_of(form)).order_by()
    head = {"Content-Disposition": f'attachment; filename="{file}"'}
    stream = counted(lines(rows, "at", EXPORTED), person)
    return StreamingHttpResponse(stream, content_type=kind, headers=head)


async def counted(lines: AsyncIterator[str], person: int) -> AsyncIterator[str]:
    """The lines, counted as an export of that person from the first one to the last, or until the client leaves."""
    EXPORTING[person] += 1
    try:
        async for each in lines:
            yield each
    finally:
        EXPORTING[person] -= 1
        if not EXPORTING[person]:
            del EXPORTING[person]


@require_GET
@allows(UserRole.VIEWER)
def decision_detail(request: HttpRequest, decision_id: int) -> HttpResponse:
    decision = get_object_or_404(Decision, pk=decision_id)
    changed = changed_fields(decision.inputs)
    inputs = {name: value for name, value in decision.inputs.items() if not (changed and name in SIDES)}
    shown_inputs, outcome = linked_figures(decision, inputs, decision.outcome)
    sections = [
        ("Inputs", shown_inputs),
        ("Outcome", outcome),
        ("Rejected alternatives", alternatives(decision.rejected)),
    ]
    context = {"decision": decision, "sentence": sentence(decision), "changed": changed, "sections": sections}
    context |= {"revert_url": revert_url(decision), "leads": leads(decision), "policy": policy_of(decision)}
    context |= {"ways": ways_of(decision)}
    return render(request, "console/audit/decision.html", context)


def policy_of(decision: Decision) -> ScalingPolicy | None:
    """The policy behind a scaler's decision, if it still exists."""
    model, _, role = decision.subject.rpartition("/")
    if decision.subject_type != "scaling_policy" or not model:
        return None
    return catalogue.scaling_policies().filter(model__name=model, role=role).first()


def revert_url(decision: Decision) -> str:
    """URL of the form with the values before a change; "" if there is no such form or the row no longer exists."""
    page, rows = REVERTED_AT.get(decision.kind, ("", None))
    if not page:
        return ""
    if rows is None:
        return f"{reverse(page)}?restore={decision.pk}"
    row = rows().filter(pk=decision.outcome.get("id")).first()
    return f"{reverse(page, args=[row.pk])}?restore={decision.pk}" if row else ""
