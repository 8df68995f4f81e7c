"""The menu and the user's role, for every page."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.urls import reverse

from controller.selectors.roles import UserRole, role_of

# Name of the page, its title, and the pages below it.
PAGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("overview", "Overview", ("goodput",)),
    ("queue", "Queue", ()),
    (
        "requests",
        "Requests",
        ("request", "request-compare", "lengths", "pattern-graphs", "version-history", "workflows", "workflow"),
    ),
    ("classes", "SLO classes", ("class-new", "class-edit", "class-remove", "class-history")),
    ("mappings", "Priority mapping", ("mapping-new", "mapping-edit", "mapping-history")),
    ("tenants", "Tenants and keys", ("tenant", "tenant-new", "tenant-edit", "key-new", "key-rotate")),
    ("service-accounts", "Service accounts", ("service-account", "service-account-new", "service-account-edit")),
    (
        "fleet",
        "Fleet",
        (
            *("instance", "instance-new", "instance-start", "instance-edit", "instance-log", "instance-role"),
            *("launch-templates", "launch-template-new", "launch-template-edit", "launch-template-remove"),
            "launch-template-history",
        ),
    ),
    ("scaling", "Scaling", ("scaling-new", "scaling-edit", "scaling-hold", "scaling-history")),
    ("flows", "Flows", ("flow-settings", "flow-settings-history")),
    ("experiments", "Experiments", ("experiment", "experiment-new", "traces")),
    ("audit", "Audit", ("decision",)),
)


def navigation(request: HttpRequest) -> dict[str, Any]:
    """Context processor."""
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return {}
    role = role_of(user)
    here = request.resolver_match.url_name if request.resolver_match else None
    items = [
        {"title": title, "url": reverse(name), "current": here == name or here in below} for name, title, below in PAGES
    ]
    return {"navigation": items, "role_name": role.name.lower(), "can_act": role >= UserRole.OPERATOR}
