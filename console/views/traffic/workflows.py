"""Workflows of the last hour: which kept the one deadline that their requests share."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from console.access import allows
from console.forms.numbers import number_of
from console.live.ttl_cache import TtlCache
from console.views.paging import numbered_page
from controller.selectors.records.workflows import MOST_RECORDS, RecentWorkflows, recent_workflows
from controller.selectors.roles import UserRole

PAGE_ROWS = 50
KEPT_S = 2.0

READ: TtlCache[RecentWorkflows] = TtlCache(KEPT_S)


@require_GET
@allows(UserRole.VIEWER)
def workflow_list(request: HttpRequest) -> HttpResponse:
    found, now = READ.get(lambda: recent_workflows(timezone.now())), timezone.now()
    page = numbered_page(found.workflows, number_of(request.GET.get("page", "")), PAGE_ROWS)
    context = {"found": found, "page": page, "now": now, "most": MOST_RECORDS}
    return render(request, "console/traffic/workflows.html", context)
