"""Steps that a client's own tools do: reported to their workflow, and their results kept for it and for equal ones.

A report is a node of the workflow's pattern graph, as a request is. Results are kept as answers of steps are, of
tenants with a retention; without Redis nothing is known of them.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, NamedTuple

import orjson

from api.openai.protocol.errors import ApiError
from api.openai.protocol.tool_bodies import ToolReport, other_input
from api.openai.steps import READ_S, Steps
from api.openai.workflows import Workflows
from controller.core.snapshot import TenantConfig
from workers.live import LiveUnavailable
from workers.steps import LARGEST_BYTES, keep_step, read_step
from workers.tool_steps import read_shared, share_tool, step_of
from workers.workflows import ReportTool


class KeptTool(NamedTuple):
    """`id`: of the step that has the result."""

    id: str
    name: str
    digest: str
    result: Any
    state_ref: str


async def tool_step(
    steps: Steps, workflows: Workflows, tenant: TenantConfig, workflow: str, told: ToolReport
) -> dict[str, Any]:
    """What its client is answered. Raises ApiError."""
    if (told.result is not None or told.shares or told.state_ref) and not tenant.retention_s:
        field = "result" if told.result is not None else "share_result" if told.shares else "state_ref"
        raise ApiError(
            "permission_denied",
            f"{field}: this tenant's retention_s is 0, so nothing is kept of its steps.",
            param=field,
        )
    if found := await _kept(steps, tenant, workflow, told):
        return _shown(found.id, told.name, stored=True, result=found.result, state_ref=found.state_ref)
    if told.took_s is None:
        return _shown(told.key or None, told.name, stored=False)
    name = told.key or f"tool-{secrets.token_hex(12)}"
    raw = _raw(name, told)
    await workflows.report(ReportTool(tenant.name, workflow, name, told.name, told.took_s, told.ago_s, told.parents))
    kept = raw is not None and await _keep(steps, tenant, workflow, told, raw)
    return _shown(name, told.name, stored=False) | {"kept": kept}


async def _kept(steps: Steps, tenant: TenantConfig, workflow: str, told: ToolReport) -> KeptTool | None:
    """By its key or, if it is asked for, of an equal step."""
    if steps.board is None or not tenant.retention_s:
        return None
    try:
        async with asyncio.timeout(READ_S), steps.lane(tenant.name).reads:
            raw = await steps.board.run(read_step(tenant.name, workflow, step_of(told.key))) if told.key else None
            own = raw is not None
            if raw is None and told.shares and told.took_s is None:
                raw = await steps.board.run(read_shared(tenant.name, told.name, told.digest))
    except (LiveUnavailable, TimeoutError):
        steps.counts["unread"] += 1
        return None
    if raw is None:
        return None
    try:
        found = KeptTool(**orjson.loads(raw))
    except (orjson.JSONDecodeError, TypeError):
        steps.counts["unreadable"] += 1
        return None
    if (found.name, found.digest) != (told.name, told.digest):
        if own:
            raise other_input(told.key)
        return None
    steps.counts["found"] += 1
    return found


def _raw(name: str, told: ToolReport) -> bytes | None:
    """What is kept. Raises ApiError if it is too large."""
    if not told.key or (told.result is None and not told.state_ref):
        return None
    result = None if told.result is None else orjson.Fragment(told.result)
    whole = {"id": name, "name": told.name, "digest": told.digest, "result": result, "state_ref": told.state_ref}
    raw = orjson.dumps(whole)
    if len(raw) > LARGEST_BYTES:
        message = f"result: at most {LARGEST_BYTES >> 10} KiB are kept of a step."
        raise ApiError("request_too_large", message, param="result")
    return raw


async def _keep(steps: Steps, tenant: TenantConfig, workflow: str, told: ToolReport, raw: bytes) -> bool:
    if steps.board is None:
        return False
    try:
        async with steps.lane(tenant.name).writes:
            kept = keep_step(tenant.name, workflow, step_of(told.key), raw, tenant.retention_s)
            came = await steps.board.run(kept)
            if came != "full" and told.shares:
                shared = share_tool(tenant.name, told.name, told.digest, workflow, told.key, tenant.retention_s)
                await steps.board.run(shared)
    except LiveUnavailable:
        steps.counts["unwritten"] += 1
        return False
    steps.counts[came] += 1
    return came != "full"


def _shown(name: str | None, tool: str, *, stored: bool, result: Any = None, state_ref: str = "") -> dict[str, Any]:
    found = {"id": name, "object": "workflow.step", "kind": "tool", "name": tool, "stored": stored}
    return found | ({"result": result, "state_ref": state_ref or None} if stored else {})
