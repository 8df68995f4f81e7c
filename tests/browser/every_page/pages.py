"""Every page of the console and every action on one: addresses, who may, and the control that begins it.

`test_tables.py` compares both with the console's addresses; tests and `make screenshots` read them.
Addresses name what `tests/browser/every_page/places.py` finds, in braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

RANK = {"viewer": 1, "operator": 2, "admin": 3}


class Listed(NamedTuple):
    """A page that has an address of its own. `role`: the least one that sees it."""

    name: str
    path: str
    role: str = "viewer"
    status: int = 200

    def at(self, places: Mapping[str, str]) -> str:
        return self.path.format_map(places)

    def open_to(self, role: str) -> bool:
        return RANK[role] >= RANK[self.role]


PAGES = (
    Listed("overview", "/"),
    Listed("goodput", "/goodput/"),
    Listed("queue", "/queue/"),
    Listed("requests", "/requests/"),
    Listed("workflows", "/workflows/"),
    Listed("workflow", "/workflows/one/?tenant=demo&workflow={workflow}"),
    Listed("request", "/requests/{missed}/"),
    Listed("compare", "/requests/compare/?id={missed}&id={request}"),
    Listed("lengths", "/lengths/"),
    Listed("version-history", "/lengths/history/?model=demo"),
    Listed("pattern-graphs", "/lengths/graphs/?tenant=demo"),
    Listed("classes", "/classes/"),
    Listed("class-new", "/classes/new/", "operator"),
    Listed("class-change", "/classes/{class}/", "operator"),
    Listed("class-remove", "/classes/{class}/remove/", "operator"),
    Listed("class-history", "/classes/{class}/history/"),
    Listed("mapping", "/mappings/"),
    Listed("mapping-change", "/mappings/{mapping}/", "operator"),
    Listed("mapping-history", "/mappings/{mapping}/history/"),
    Listed("tenants", "/tenants/"),
    Listed("tenant", "/tenants/{tenant}/"),
    Listed("tenant-new", "/tenants/new/", "admin"),
    Listed("tenant-change", "/tenants/{tenant}/change/", "admin"),
    Listed("service-accounts", "/service-accounts/"),
    Listed("service-account", "/service-accounts/{account}/"),
    Listed("service-account-new", "/service-accounts/new/", "admin"),
    Listed("service-account-change", "/service-accounts/{account}/change/", "admin"),
    Listed("fleet", "/fleet/"),
    Listed("instance", "/fleet/instances/{instance}/"),
    Listed("instance-new", "/fleet/new/", "operator"),
    Listed("instance-start", "/fleet/start/", "operator"),
    Listed("instance-change", "/fleet/instances/{instance}/edit/", "operator"),
    Listed("instance-log", "/fleet/instances/{instance}/log/", "operator"),
    Listed("role", "/fleet/instances/{instance}/role/", "operator"),
    Listed("launch-templates", "/launch-templates/"),
    Listed("launch-template-new", "/launch-templates/new/", "admin"),
    Listed("launch-template-change", "/launch-templates/{template}/", "admin"),
    Listed("launch-template-remove", "/launch-templates/{template}/remove/", "admin"),
    Listed("launch-template-history", "/launch-templates/{template}/history/"),
    Listed("scaling", "/scaling/"),
    Listed("scaling-new", "/scaling/new/", "operator"),
    Listed("scaling-change", "/scaling/{policy}/", "operator"),
    Listed("scaling-hold", "/scaling/{policy}/hold/", "operator"),
    Listed("scaling-history", "/scaling/{policy}/history/"),
    Listed("flows", "/flows/"),
    Listed("flow-settings", "/flows/settings/", "operator"),
    Listed("flow-settings-history", "/flows/settings/history/"),
    Listed("experiments", "/experiments/"),
    Listed("experiment-new", "/experiments/new/", "operator"),
    Listed("experiment", "/experiments/{experiment}/"),
    Listed("traces", "/traces/"),
    Listed("audit", "/audit/"),
    Listed("decision", "/audit/{decision}/"),
    Listed("sessions", "/sessions/"),
    Listed("patterns", "/patterns/"),
    Listed("request-missing", "/requests/req-none/", status=404),
    Listed("not-found", "/nowhere/", status=404),
)


class Action(NamedTuple):
    """What somebody of at least `role` may do: where it is sent, and the control on page `page` that begins it.

    `control`: ARIA role and name; empty where the page shows it in some states only (`test_instance_actions.py` and
    `test_experiments.py` look at those). `data` would do something if it were let in.
    """

    path: str
    role: str
    page: str
    control: tuple[str, str | re.Pattern[str]] | None
    data: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        """For reports."""
        kind = self.data.get("action") or self.data.get("kind") or self.data.get("change") or ""
        return f"{self.path}{kind}"


def _act(action: str, control: tuple[str, str] | None) -> Action:
    data = {"instance": "{instance}", "action": action, "version": "1"}
    return Action("/fleet/act/", "operator", "instance", control, data)


def _command(kind: str, control: str) -> Action:
    data = {"kind": kind, "request": "req-none", "priority": "1"}
    return Action("/queue/command/", "operator", "queue", ("button", control), data)


OPEN_WORKFLOW = {"tenant": "demo", "workflow": "{workflow}"}
ALL_WAITING = {"kind": "cancel", "until": "9999999999"}
DECODE = {"role": "decode", "version": "1"}
LESS = {"window": "hour", "change": "less"}
HOLD = {"instances": "9", "hours": "1.0", "reason": "forged", "version": "1"}
ACTIONS = (
    _command("pause", "Pause"),
    _command("resume", "Resume"),
    _command("reprioritise", "Change priority"),
    _command("cancel", "Cancel requests"),
    Action("/queue/command/all/", "operator", "queue", ("button", re.compile("^Select all")), ALL_WAITING),
    Action("/workflows/cancel/", "operator", "workflow", ("button", "Cancel workflow"), OPEN_WORKFLOW),
    Action("/classes/new/", "operator", "classes", ("link", "New class"), {"name": "forged", "ttft_s": "9"}),
    Action("/classes/{class}/", "operator", "classes", ("link", "Edit interactive"), {"ttft_s": "9"}),
    Action("/classes/{class}/remove/", "operator", "classes", ("link", "Remove interactive"), {"version": "1"}),
    Action("/classes/{class}/preview/", "operator", "class-change", ("button", re.compile("^Run simulation"))),
    Action("/mappings/{mapping}/", "operator", "mapping", ("link", re.compile("^Edit")), {"window": "9"}),
    Action("/mappings/{mapping}/preview/", "operator", "mapping-change", ("button", re.compile("^Run simulation"))),
    Action("/tenants/new/", "admin", "tenants", ("link", "New tenant"), {"name": "forged"}),
    Action("/tenants/{tenant}/change/", "admin", "tenant", ("link", "Edit"), {"state": "suspended"}),
    Action("/tenants/{tenant}/keys/", "admin", "tenant", ("button", "Create key"), {"name": "forged"}),
    Action("/keys/{key}/rotate/", "admin", "tenant", ("button", re.compile("^Rotate ")), {"grace": "0"}),
    Action("/keys/{key}/revoke/", "admin", "tenant", ("button", re.compile("^Revoke "))),
    Action("/service-accounts/new/", "admin", "service-accounts", ("link", "New service account"), {"name": "forged"}),
    Action("/service-accounts/{account}/change/", "admin", "service-account", ("link", "Edit"), {"role": "admin"}),
    Action("/service-accounts/{account}/tokens/", "admin", "service-account", ("button", "Create token")),
    Action("/service-tokens/{token}/rotate/", "admin", "service-account", ("button", re.compile("^Rotate "))),
    Action("/service-tokens/{token}/revoke/", "admin", "service-account", ("button", re.compile("^Revoke "))),
    Action("/fleet/new/", "operator", "fleet", ("link", "Register server"), {"id": "forged"}),
    Action("/fleet/start/", "operator", "fleet", ("link", "Start instance"), {"id": "forged"}),
    Action("/fleet/instances/{instance}/role/", "operator", "instance", ("link", "Change role"), DECODE),
    Action("/fleet/instances/{instance}/edit/", "operator", "instance", ("link", "Edit"), {"unit_cost": "9"}),
    _act("sleep", ("button", "Sleep")),
    _act("sleep_2", ("button", "Sleep (level 2)")),
    _act("wake", None),
    _act("load", None),
    _act("drain", ("button", "Drain")),
    _act("undrain", None),
    _act("stop", ("button", "Stop")),
    Action("/launch-templates/new/", "admin", "launch-templates", ("link", "New template"), {"name": "forged"}),
    Action("/launch-templates/{template}/", "admin", "launch-templates", ("link", "Edit vllm"), {"start_limit_s": "9"}),
    Action(
        "/launch-templates/{template}/remove/", "admin", "launch-templates", ("link", "Remove vllm"), {"version": "1"}
    ),
    Action("/launch-templates/{template}/resume/", "operator", "launch-templates", None),
    Action("/scaling/new/", "operator", "scaling", ("link", "New policy"), {"upper": "9"}),
    Action("/scaling/{policy}/", "operator", "scaling", ("link", "Edit demo/collocated"), {"upper": "9"}),
    Action("/scaling/{policy}/hold/", "operator", "scaling", ("link", "Scale by hand: demo/collocated"), HOLD),
    Action("/scaling/{policy}/release/", "operator", "scaling", None, {"version": "1"}),
    Action("/flows/settings/preview/", "operator", "flow-settings", ("button", re.compile("^Run simulation"))),
    Action(
        "/flows/settings/",
        "operator",
        "flows",
        ("link", "Edit flow settings"),
        {"flow_policy": "mfs", "drop_budget": "20"},
    ),
    Action("/experiments/ask/", "operator", "experiments", ("button", re.compile("^The last hour with one")), LESS),
    Action("/experiments/new/", "operator", "experiments", ("link", "New experiment"), {"name": "forged"}),
    Action("/experiments/check/", "operator", "experiment-new", ("button", "Start experiment")),
    Action("/experiments/{experiment}/change/", "operator", "experiment", ("button", "Save"), {"name": "forged"}),
    Action("/experiments/{experiment}/cancel/", "operator", "experiment", None),
    Action("/experiments/{experiment}/remove/", "operator", "experiment", ("button", "Remove")),
    Action("/sessions/end/", "viewer", "sessions", None, {"session": "none"}),
    Action("/traces/", "operator", "traces", ("button", "Upload trace"), {"name": "forged"}),
    Action("/traces/{trace}/remove/", "operator", "traces", ("button", re.compile("^Remove "))),
)

# What anybody may take away from a page: link on it, and how the file's name ends.
SAVED = (
    ("audit", "Export CSV", ".csv"),
    ("audit", "Export JSON", ".json"),
    ("experiment", "CSV", ".csv"),
    ("experiment", "JSON", ".json"),
)
