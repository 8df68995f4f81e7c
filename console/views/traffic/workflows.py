"""Workflows of the last hour: which kept the one deadline that their requests share."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from console.access import allows
from console.forms.numbers import number_of
from console.live.ttl_cache import TtlCache
from controller.selectors.records.workflows import MOST_RECORDS, RecentWorkflows, recent_workflows
from controller.selectors.roles import UserRole

PAGE_ROWS = 50
KEPT_S = 2.0

READ: TtlCache[RecentWorkflows] = TtlCache(KEPT_S)


@require_GET
@allows(UserRole.VIEWER)
def workflow_list(request: HttpRequest) -> HttpResponse:
    """`page`: from 1; one beyond the last is the last."""
    found, now = READ.get(lambda: recent_workflows(timezone.now())), timezone.now()
    pages = max(1, -(-len(found.workflows) // PAGE_ROWS))
    page = min(max(1, number_of(request.GET.get("page", "")) or 1), pages)
    rows = found.workflows[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]
    context = {"found": found, "rows": rows, "page": page, "pages": pages, "now": now, "most": MOST_RECORDS}
    return render(request, "console/traffic/workflows.html", context)
