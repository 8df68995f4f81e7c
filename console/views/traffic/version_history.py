"""The history of what is learned from records: each stored version of a model's length forest, or of a tenant's pattern
graphs, with its test, and what gateways did with it."""

from __future__ import annotations

from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from console.access import allows
from console.forms.numbers import number_of
from console.views.paging import numbered_page
from controller.core.messages import GRAPHS, LENGTHS
from controller.models import GraphVersion, LengthVersion
from controller.selectors.records.learned_versions import all_rows, newest_in_force
from controller.selectors.records.takeovers import Version, outcomes_of
from controller.selectors.roles import UserRole

PAGE_ROWS = 20
NAME_MAX = 120


@require_GET
@allows(UserRole.VIEWER)
def version_history(request: HttpRequest) -> HttpResponse:
    """`model`: of its length forest; else `tenant`: of its pattern graphs."""
    model, tenant = (request.GET.get(name, "").replace("\x00", "")[:NAME_MAX] for name in ("model", "tenant"))
    rows: list[Version]
    in_force: Version | None
    if model:
        what, subject, filters = LENGTHS, model, {"model": model}
        lengths = list(all_rows(LengthVersion, model=model))
        rows, in_force = [*lengths], newest_in_force(lengths, timezone.now())
    else:
        what, subject, filters = GRAPHS, tenant, {"tenant": tenant}
        graphs = list(all_rows(GraphVersion, tenant=tenant))
        rows, in_force = [*graphs], newest_in_force(graphs, timezone.now())
    page = numbered_page(rows, number_of(request.GET.get("page", "")), PAGE_ROWS)
    outcomes = outcomes_of(what, subject, page.rows)
    context = {
        "lengths": what == LENGTHS,
        "subject": subject,
        "page": page,
        "filters": urlencode(filters),
        "in_force": in_force,
        "rows": [(row, outcomes.get(row.version, ())) for row in page.rows],
    }
    return render(request, "console/traffic/version_history.html", context)
