"""Answer lengths: the versions of each model's length forest, how they were judged, and which is in force; below them
those of each tenant's pattern graphs."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from console.access import allows
from controller.predict.answer_lengths import LEAST_ANSWERS, MOST_AGE_S, TARGET
from controller.selectors.records.graph_versions import tenant_versions
from controller.selectors.records.length_versions import RECENT, model_versions
from controller.selectors.roles import UserRole


@require_GET
@allows(UserRole.VIEWER)
def lengths_page(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    context = {
        "models": model_versions(now),
        "tenants": tenant_versions(now),
        "target": TARGET,
        "recent": RECENT,
        "least": LEAST_ANSWERS,
        "most_days": round(MOST_AGE_S / 86_400),
    }
    return render(request, "console/traffic/lengths.html", context)
