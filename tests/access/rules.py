"""Who may call what: one rule for each route of gateway and console. `python -m tests.access.table` prints them.

A rule names the least caller that gets in. `-` is a method that the route does not have.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.api.control.test_access import RULES as CONTROL

ANYONE, SIGNED_IN, VIEWER, OPERATOR, ADMIN = "anyone", "signed in", "viewer", "operator", "admin"
SUPERUSER = "superuser"
NONE = "-"
PEOPLE = ("nobody", "no role", VIEWER, OPERATOR, ADMIN)
REACH = {ANYONE: 0, SIGNED_IN: 1, VIEWER: 2, OPERATOR: 3, ADMIN: 4}  # index into PEOPLE of the least who gets in


class Rule(NamedTuple):
    """Of a page: who may read it, and who may send its form."""

    read: str
    send: str = NONE


READ, EDIT, ACT = Rule(VIEWER), Rule(OPERATOR, OPERATOR), Rule(NONE, OPERATOR)
ADMIN_EDIT, ADMIN_ACT = Rule(ADMIN, ADMIN), Rule(NONE, ADMIN)

# Pages of the console, by route. A tenant's key or a service account's token is nobody there.
PAGES: dict[str, Rule] = {
    "": READ,
    "overview/history/": READ,
    "goodput/": READ,
    "queue/": READ,
    "queue/command/": ACT,
    "queue/command/all/": ACT,
    "queue/command/all/<order_id>/": Rule(OPERATOR),
    "requests/": READ,
    "requests/compare/": READ,
    "workflows/": READ,
    "workflows/one/": READ,
    "workflows/one/live/": READ,
    "workflows/cancel/": ACT,
    "requests/<str:request_id>/": READ,
    "classes/": READ,
    "classes/new/": EDIT,
    "classes/<int:class_id>/": EDIT,
    "classes/<int:class_id>/remove/": EDIT,
    "classes/<int:class_id>/preview/": ACT,
    "classes/<int:class_id>/history/": READ,
    "mappings/": READ,
    "mappings/<int:mapping_id>/": EDIT,
    "mappings/<int:mapping_id>/preview/": ACT,
    "mappings/<int:mapping_id>/history/": READ,
    "previews/<str:slug>/": Rule(OPERATOR),
    "tenants/": READ,
    "tenants/new/": ADMIN_EDIT,
    "tenants/<int:tenant_id>/": READ,
    "tenants/<int:tenant_id>/change/": ADMIN_EDIT,
    "tenants/<int:tenant_id>/keys/": ADMIN_ACT,
    "keys/<int:key_id>/rotate/": ADMIN_ACT,
    "keys/<int:key_id>/revoke/": ADMIN_ACT,
    "service-accounts/": READ,
    "service-accounts/new/": ADMIN_EDIT,
    "service-accounts/<int:account_id>/": READ,
    "service-accounts/<int:account_id>/change/": ADMIN_EDIT,
    "service-accounts/<int:account_id>/tokens/": ADMIN_ACT,
    "service-tokens/<int:token_id>/rotate/": ADMIN_ACT,
    "service-tokens/<int:token_id>/revoke/": ADMIN_ACT,
    "fleet/": READ,
    "fleet/live/": READ,
    "fleet/new/": EDIT,
    "fleet/start/": EDIT,
    "fleet/act/": ACT,
    "fleet/instances/<path:instance_id>/": READ,
    "fleet/instances/<path:instance_id>/live/": READ,
    "fleet/instances/<path:instance_id>/role/": EDIT,
    "fleet/instances/<path:instance_id>/edit/": EDIT,
    "fleet/instances/<path:instance_id>/log/": Rule(OPERATOR),
    "fleet/instances/<path:instance_id>/log/live/": Rule(OPERATOR),
    "launch-templates/": READ,
    "launch-templates/new/": ADMIN_EDIT,
    "launch-templates/<int:template_id>/": ADMIN_EDIT,
    "launch-templates/<int:template_id>/remove/": ADMIN_EDIT,
    "launch-templates/<int:template_id>/resume/": ACT,
    "launch-templates/<int:template_id>/history/": READ,
    "scaling/": READ,
    "scaling/live/": READ,
    "scaling/new/": EDIT,
    "scaling/<int:policy_id>/": EDIT,
    "scaling/<int:policy_id>/history/": READ,
    "scaling/<int:policy_id>/hold/": EDIT,
    "scaling/<int:policy_id>/release/": ACT,
    "lengths/": READ,
    "lengths/history/": READ,
    "lengths/graphs/": READ,
    "flows/": READ,
    "flows/live/<int:page>/": READ,
    "flows/settings/": EDIT,
    "flows/settings/preview/": ACT,
    "flows/settings/history/": READ,
    "patterns/": READ,
    "experiments/": READ,
    "experiments/new/": EDIT,
    "experiments/check/": ACT,
    "experiments/ask/": ACT,
    "experiments/<str:slug>/": READ,
    "experiments/<str:slug>/change/": ACT,
    "experiments/<str:slug>/cancel/": ACT,
    "experiments/<str:slug>/remove/": ACT,
    "experiments/<str:slug>/csv/": READ,
    "experiments/<str:slug>/json/": READ,
    "traces/": Rule(VIEWER, OPERATOR),
    "traces/<str:slug>/remove/": ACT,
    "audit/": READ,
    "audit/export/": READ,
    "audit/<int:decision_id>/": READ,
    "session/": READ,
    "sessions/": READ,
    "sessions/end/": Rule(NONE, VIEWER),
    "login/": Rule(ANYONE, ANYONE),
    "logout/": Rule(NONE, ANYONE),
    "api/docs": Rule(ANYONE),
    "api/schema": Rule(ANYONE),
    "favicon.ico": Rule(ANYONE, ANYONE),
}

# Answered by console and gateway alike: the whole answer for holders of METRICS_TOKEN or the same machine.
STATUS = {
    "/livez": "anyone",
    "/healthz": "anyone the status; METRICS_TOKEN the rest",
    "/metrics": "METRICS_TOKEN",
}

# The admin site, by the end of the route. Accounts with the staff flag and the role read; superusers change people,
# nothing else.
ADMIN_SITE: dict[str, Rule] = {
    "admin/auth/user/": Rule(SUPERUSER, SUPERUSER),
    "admin/": Rule(VIEWER, VIEWER),  # what is under it can be read only, whatever is sent
    "admin/login/": Rule(ANYONE, ANYONE),  # leads to the console's own form
}

# Live topics, by address.
SOCKETS = {"ws/overview": VIEWER, "ws/queue": VIEWER, "ws/decisions": VIEWER, "ws/experiments": VIEWER}

# The gateway: method, and what the caller must show.
GATEWAY = {
    "/v1/chat/completions": ("POST", "inference"),
    "/v1/completions": ("POST", "inference"),
    "/v1/responses": ("POST", "inference"),
    "/v1/models": ("GET", "inference"),
    "/v1/models/": ("GET", "inference"),
    "/v1/responses/": ("GET, POST, DELETE", "inference"),
    "/v1/workflows": ("POST", "inference"),
    "/v1/workflows/": ("GET, POST, DELETE", "inference"),
}

__all__ = ["CONTROL"]
