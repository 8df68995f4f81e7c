"""Answer lengths: the versions of each model's length forest, how they were judged, and which is in force; below them
those of each tenant's pattern graphs."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from console.access import allows
from controller.core.messages import GRAPHS, LENGTHS
from controller.predict.answer_lengths import LEAST_ANSWERS, MOST_AGE_S, PRODUCED, TARGET
from controller.predict.graph_edges import most_used
from controller.selectors.records.graph_versions import graphs_in_use, kind_names, tenant_versions
from controller.selectors.records.length_versions import RECENT, model_versions
from controller.selectors.records.takeovers import takeovers
from controller.selectors.roles import UserRole
from workers import live

MOST_GRAPHS_SHOWN = 5
TENANT_MAX = 64


@require_GET
@allows(UserRole.VIEWER)
def lengths_page(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    try:
        fleets, no_gateways = live.read_fleet(), "No gateway is reporting."
    except live.LiveUnavailable:
        fleets, no_gateways = [], "Redis is unavailable. It is not known which versions gateways use."
    context = {
        "models": [(each, takeovers(fleets, LENGTHS, each.model, each.in_force, now)) for each in model_versions(now)],
        "tenants": [
            (each, takeovers(fleets, GRAPHS, each.tenant, each.in_force, now)) for each in tenant_versions(now)
        ],
        "fleets": fleets,
        "no_gateways": no_gateways,
        "target": TARGET,
        "produced": PRODUCED,
        "recent": RECENT,
        "least": LEAST_ANSWERS,
        "most_days": round(MOST_AGE_S / 86_400),
    }
    return render(request, "console/traffic/lengths.html", context)


@require_GET
@allows(UserRole.VIEWER)
def pattern_graphs(request: HttpRequest) -> HttpResponse:
    """The graphs of one tenant that stand for most workflows."""
    tenant, now = request.GET.get("tenant", "").replace("\x00", "")[:TENANT_MAX], timezone.now()
    found = graphs_in_use(tenant, now)
    context: dict[str, object] = {"tenant": tenant, "shown": MOST_GRAPHS_SHOWN}
    if found is not None:
        row, graphs = found
        spelled = most_used(graphs, kind_names(tenant, now), MOST_GRAPHS_SHOWN)
        rows = [(each, [(node, each.before(node)) for node in each.nodes]) for each in spelled]
        context |= {"row": row, "count": len(graphs), "graphs": rows}
    return render(request, "console/traffic/pattern_graphs.html", context)
