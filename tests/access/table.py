"""docs/reference/access.md, printed from the rules that `tests/access` holds the servers to.

`.venv/bin/python -m tests.access.table > docs/reference/access.md` writes it again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

HEAD = """# Who may call what

Written by `python -m tests.access.table` from the rules that the tests hold both servers to: a route without a rule
fails a test. What each caller proves its identity with: [trust boundaries](trust-boundaries.md). "viewer", "operator"
and "admin" name the least role; higher roles may do the same. A person without a role gets 403 everywhere but at the
sign-in page.

## Gateway

| address | method | who |
|---|---|---|
"""
NAMES = {"inference": "a tenant's key with scope `inference`"}
STATUS_WORDS = {
    "anyone": "anybody",
    "METRICS_TOKEN": "holders of `METRICS_TOKEN`; without that setting the same machine",
    "anyone the status; METRICS_TOKEN the rest": "anybody the status; the rest as `/metrics`",
}
PAGES_HEAD = """
## Pages of the console

For people with a session. Keys and tokens open no page: without a session every page leads to the sign-in page.

| address | read | send its form |
|---|---|---|
"""
CONTROL_HEAD = """
## Control API

A tenant's key needs the scope `read`, reads its own tenant's data only and changes nothing. A service account needs the
role *and* the scope; to read, `read` suffices.

| address under `/api/v1` | method | role | tenant's key | scope of a service account |
|---|---|---|---|---|
"""
ADMIN = """
## Admin site

| address | read | change |
|---|---|---|
| `/admin/login/` | anybody: leads to the console's sign-in page | - |
| `/admin/auth/user/` and below | superusers | superusers |
| everything else under `/admin/` | viewers with the staff flag | nobody |
"""


def lines() -> Iterable[str]:
    from api.control.access.scopes import OF_RESOURCE
    from tests.access import rules

    yield HEAD.rstrip("\n")
    for path, (method, who) in rules.GATEWAY.items():
        yield f"| `{path}{'...' if path.endswith('/') else ''}` | {method} | {NAMES[who]} |"
    yield "\n## Both servers\n\n| address | who |\n|---|---|"
    for path, who in rules.STATUS.items():
        yield f"| `{path}` | {STATUS_WORDS[who]} |"
    yield PAGES_HEAD.rstrip("\n")
    for path, rule in rules.PAGES.items():
        yield f"| `/{_shown(path)}` | {rule.read} | {rule.send} |"
    yield "| `/static/...` | anyone | - |"
    yield "\n## Live topics (WebSocket)\n\n| address | who |\n|---|---|"
    for path, who in rules.SOCKETS.items():
        yield f"| `/{path}` | {who}, with a session and an origin of the console |"
    yield CONTROL_HEAD.rstrip("\n")
    for (method, path), who in sorted(rules.CONTROL.items(), key=lambda each: (each[0][1], each[0][0])):
        role = next(each for each in ("viewer", "operator", "admin") if each in who)
        scope = OF_RESOURCE.get(path.split("/")[1])
        needed = f"`{scope.value}`" if scope else "`read`"
        needed += " or `read`" if scope and method == "get" else ""
        key = "reads its own" if "tenant_key" in who else "-"
        yield f"| `{path.replace('999999', '{id}')}` | {method.upper()} | {role} | {key} | {needed} |"
    yield ADMIN.rstrip("\n")


def _shown(route: str) -> str:
    """The route with `{name}` where a value is filled in."""
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route)


def text() -> str:
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    import django

    django.setup()
    print(text(), end="")
