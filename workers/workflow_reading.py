"""Workflows for pages and the control API: records of their requests, and what gateways keep of them in Redis."""

from __future__ import annotations

from datetime import datetime

from controller.models import Tenant
from controller.selectors.records.workflows import (
    OneWorkflow,
    RecentWorkflows,
    one_workflow,
    recent_workflows,
    with_kept,
)
from workers import live
from workers.workflows import open_workflows, read_workflow, read_workflows

MOST_ASKED = 1_000  # workflows of the records whose state is read, the newest first
MOST_TENANTS = 1_000


def all_workflows(now: datetime, tenant: str | None = None) -> RecentWorkflows:
    """Of all tenants, or of one: those with requests in the last hour, and those that are open. Without what gateways
    keep (`live` False) while Redis is unavailable."""
    found = recent_workflows(now, tenant)
    tenants = [tenant] if tenant is not None else list(Tenant.objects.values_list("name", flat=True)[:MOST_TENANTS])
    dated = [(each.tenant, each.name) for each in found.workflows if each.due_at is not None]
    try:
        names = list(dict.fromkeys([*live.run(open_workflows(tenants)), *dated[:MOST_ASKED]]))
        states = live.run(read_workflows(names))
    except live.LiveUnavailable:
        return found
    kept = {name: state for name, state in zip(names, states, strict=True) if state is not None}
    return with_kept(found, kept, now)


def find_workflow(tenant: str, name: str, now: datetime) -> OneWorkflow | None:
    """None if nobody knows of it."""
    try:
        return one_workflow(tenant, name, live.run(read_workflow(tenant, name)), now)
    except live.LiveUnavailable:
        return one_workflow(tenant, name, None, now, live=False)
