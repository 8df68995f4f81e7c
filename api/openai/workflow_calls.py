"""`/v1/workflows`: begin a workflow before its first request, read it, cancel it; with the tenant's key.

Beginning one counts as one request of the tenant's quota. What was cancelled stays so; another tenant's workflow does
not exist.
"""

from __future__ import annotations

import orjson

from api.openai.asgi import Receive, Scope, Send, header, read_body, respond
from api.openai.gateway import Caller, Gateway
from api.openai.protocol.errors import ApiError
from api.openai.protocol.schemas import LONGEST_NAME
from api.openai.protocol.tool_bodies import parse_tool
from api.openai.protocol.workflow_bodies import parse_fork, parse_workflow, workflow_object
from api.openai.tenants import Held
from api.openai.tool_steps import tool_step
from api.openai.workflows import UNKNOWN
from controller.slo.classes import NotEntitled, check_fields
from workers.steps import LARGEST_BYTES
from workers.workflows import BY_TENANT, OpenWorkflow, WorkflowState

WORKFLOWS = "/v1/workflows"
CANCEL = "/cancel"
STEPS = "/steps"
FORK = "/fork"
BRANCHES = "/branches/"
LONGEST = 2 * LONGEST_NAME + len(BRANCHES)  # of an address, after WORKFLOWS
BODY_BYTES = 16 << 10
TOOL_BYTES = LARGEST_BYTES + BODY_BYTES


async def begin(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    """201; 200 if it was begun before with the same deadline and stages."""
    if scope["method"] != "POST":
        raise ApiError("method_not_allowed", "Use POST, or GET with the id of a workflow.")
    key = header(scope, b"authorization")
    caller = gateway.caller(key)
    raw = await _body(gateway, caller, scope, receive)
    opened = parse_workflow(raw)
    caller = gateway.caller(key)  # again: the key may have been revoked while the body came
    tenant = caller.tenant
    try:
        check_fields(opened.asked, tenant.entitled)
    except NotEntitled as error:
        raise ApiError("permission_denied", f"{error}.", param=error.field) from None
    gateway.quotas.admit(tenant, 0, gateway.clock())
    try:
        order = OpenWorkflow(tenant.name, opened.id, opened.deadline_s, opened.stages)
        found = await gateway.workflows.open(order)
    finally:
        gateway.quotas.release(tenant.name, 0, 0)
    await _answer(send, caller, opened.id, found, 201 if found.new else 200)


async def one(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    """GET reads it, POST to its `/cancel` cancels it, to its `/fork` forks it at a step, to its `/steps`
    reports a tool step, DELETE of its `/steps` forgets
    the answers of its steps, of one of its `/branches/` ends that. Ids may have slashes."""
    key = header(scope, b"authorization")
    caller = gateway.caller(key)
    name, method = scope["path"][len(WORKFLOWS) + 1 :], scope["method"]
    if len(name) > LONGEST:
        raise ApiError("not_found", UNKNOWN)
    if not (method == "POST" and name.endswith((FORK, STEPS))):  # those count as requests
        gateway.quotas.call(caller.tenant.name, gateway.clock())
    if method == "GET":
        found = await gateway.workflows.read(caller.tenant.name, name)
    elif method == "POST" and name.endswith(CANCEL):
        name = name.removesuffix(CANCEL)
        await _body(gateway, caller, scope, receive)
        caller = gateway.caller(key)
        found = await gateway.workflows.cancel(caller.tenant.name, name, BY_TENANT)
        gateway.workflow_cancelled(caller.tenant.name, name, found)
    elif method == "POST" and name.endswith(FORK):
        await _fork(gateway, caller, key, name.removesuffix(FORK), scope, receive, send)
        return
    elif method == "POST" and name.endswith(STEPS):
        await _tool(gateway, caller, key, name.removesuffix(STEPS), scope, receive, send)
        return
    elif method == "DELETE" and BRANCHES in name:
        await gateway.forks.end(caller.tenant.name, name.rpartition(BRANCHES)[2])
        await respond(send, 200, orjson.dumps({"object": "workflow.branch", "deleted": True}))
        return
    elif method == "DELETE" and name.endswith(STEPS):
        gone = await gateway.steps.forgotten(caller.tenant.name, name.removesuffix(STEPS))
        await respond(send, 200, orjson.dumps({"object": "workflow.steps", "deleted": gone}))
        return
    else:
        raise ApiError(
            "method_not_allowed", "Use GET, POST to the workflow's /cancel, /fork or /steps, or DELETE of its /steps."
        )
    await _answer(send, caller, name, found, 200)


async def _fork(
    gateway: Gateway, caller: Caller, key: bytes | None, name: str, scope: Scope, receive: Receive, send: Send
) -> None:
    """201; 200 if it was forked before with this id. Counts as one request of the tenant's quota."""
    asked = parse_fork(await _body(gateway, caller, scope, receive))
    tenant = gateway.caller(key).tenant
    gateway.quotas.admit(tenant, 0, gateway.clock())
    try:
        fork = await gateway.forks.open(tenant.name, name, asked)
    finally:
        gateway.quotas.release(tenant.name, 0, 0)
    shown = {
        "id": fork.id,
        "object": "workflow.fork",
        "workflow": name,
        "step": asked.step,
        "branches": fork.branches,
        "open": fork.open,
        "checkpoint": "held" if fork.held else "lost",
        "lease": fork.lease_s,
    }
    await respond(send, 201 if fork.new else 200, orjson.dumps(shown))


async def _tool(
    gateway: Gateway, caller: Caller, key: bytes | None, name: str, scope: Scope, receive: Receive, send: Send
) -> None:
    """201; 200 for a step whose result was kept, or that is asked for. Counts as one request of the tenant's quota."""
    told = parse_tool(await _body(gateway, caller, scope, receive, TOOL_BYTES))
    tenant = gateway.caller(key).tenant
    gateway.quotas.admit(tenant, 0, gateway.clock())
    try:
        shown = await tool_step(gateway.steps, gateway.workflows, tenant, name, told)
    finally:
        gateway.quotas.release(tenant.name, 0, 0)
    await respond(send, 200 if shown["stored"] or told.took_s is None else 201, orjson.dumps(shown))


async def _body(
    gateway: Gateway, caller: Caller, scope: Scope, receive: Receive, most: int = BODY_BYTES
) -> bytes | bytearray:
    held = Held(gateway.quotas, caller.tenant, gateway.clock())
    try:
        return await read_body(scope, receive, most, held.add, held.turns)
    finally:
        held.give_back()


async def _answer(send: Send, caller: Caller, name: str, found: WorkflowState, status: int) -> None:
    shown = workflow_object(name, found, caller.tenant)
    await respond(send, status, orjson.dumps(shown))
