"""The body of `POST /v1/workflows`, and what a workflow looks like to its client."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from api.openai.protocol.errors import ApiError
from api.openai.protocol.schemas import Body, integer, load, name_of, wrong
from controller.core.snapshot import TenantConfig
from controller.slo.classes import SloError, SloFields, parse_slo_fields
from controller.slo.workflow import WorkflowTime, past_from, shares_from
from workers.workflows import Stage, WorkflowState

FIELDS = ("id", "deadline", "stages")
STAGE_FIELDS = ("name", "share")
FORK_FIELDS = ("step", "branches", "fork_id")
MOST_STAGES = 32
MOST_BRANCHES = 64
MOST_STAGE_CHARS = 2_000  # of all names together: a tenant may have thousands of workflows
LARGEST_SHARE = 1_000.0


class NewWorkflow(NamedTuple):
    """`asked`: with the deadline alone, to be checked against the tenant's entitlements."""

    id: str
    asked: SloFields
    deadline_s: float
    stages: tuple[Stage, ...]


class NewFork(NamedTuple):
    """`step`: the key of the step to go on from. `id`: of the client; "": it has given none."""

    step: str
    branches: int
    id: str


def parse_workflow(raw: Body) -> NewWorkflow:
    """Raises ApiError naming the field."""
    body = load(raw)
    for field in body:
        if field not in FIELDS:
            raise wrong(field[:100], f"is not a field of a workflow; it has {', '.join(FIELDS)}")
    name = body.get("id")
    name = f"wf-{secrets.token_hex(12)}" if name is None else name_of(name, "id")
    try:
        asked = parse_slo_fields({"deadline": body.get("deadline")})
    except SloError as error:
        raise ApiError("invalid_slo", str(error), param=error.field) from None
    if asked.deadline is None:
        raise wrong("deadline", "is required: seconds from now until the whole workflow is due")
    return NewWorkflow(name, asked, asked.deadline, _stages(body.get("stages")))


def _stages(given: object) -> tuple[Stage, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not 0 < len(given) <= MOST_STAGES:
        raise wrong("stages", f"must be a list of 1 to {MOST_STAGES} stages, in the order in which they follow")
    found = tuple(_stage(each, f"stages[{index}]") for index, each in enumerate(given))
    names = [stage.name for stage in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise wrong("stages", f"{twice!r} is there twice: a request says by its name which stage it belongs to")
    if sum(map(len, names)) > MOST_STAGE_CHARS:
        raise wrong("stages", f"the names may have {MOST_STAGE_CHARS} characters together")
    return found


def _stage(given: object, where: str) -> Stage:
    if not isinstance(given, Mapping):
        raise wrong(where, "must be an object with a name and, if it is not 1, a share")
    for field in given:
        if field not in STAGE_FIELDS:
            raise wrong(f"{where}.{field[:100]}", f"is not a field of a stage; it has {', '.join(STAGE_FIELDS)}")
    name, share = name_of(given.get("name"), f"{where}.name"), given.get("share", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= LARGEST_SHARE:
        raise wrong(f"{where}.share", f"must be a number above 0 and at most {LARGEST_SHARE:.0f}")
    return Stage(name, float(share))


def parse_fork(raw: Body) -> NewFork:
    """Raises ApiError naming the field."""
    body = load(raw)
    for field in body:
        if field not in FORK_FIELDS:
            raise wrong(field[:100], f"is not a field of a fork; it has {', '.join(FORK_FIELDS)}")
    step = name_of(body.get("step"), "step", ", the step_key to go on from")
    branches = integer(body, "branches", 1, MOST_BRANCHES)
    if branches is None:
        raise wrong("branches", "is required: how many there will be")
    name = body.get("fork_id")
    return NewFork(step, branches, "" if name is None else name_of(name, "fork_id"))


def workflow_object(name: str, found: WorkflowState, tenant: TenantConfig) -> dict[str, Any]:
    """With what each stage would get now, by the tenant's rule."""
    return {
        "id": name,
        "object": "workflow",
        "state": found.state,
        "created_at": found.began_at,
        "deadline": found.deadline_s,
        "deadline_left": round(found.left_s, 3),
        "cancelled_at": found.cancelled_at,
        "cancelled_by": found.cancelled_by or None,
        "requests": found.seen,
        "answered": found.answered,
        "failed": found.failed,
        "running": found.running,
        "output_tokens": found.output_tokens,
        "goodput_tokens": found.output_tokens if found.in_time else 0,
        "in_time": found.in_time,
        "stages": [_stage_object(stage, found, tenant) for stage in found.stages],
    }


def _stage_object(stage: Stage, found: WorkflowState, tenant: TenantConfig) -> dict[str, Any]:
    told = (found.stages, stage.name, None)
    time = WorkflowTime(
        found.left_s, shares_from(*told), "inherited", past=past_from(*told), whole_s=found.deadline_s
    ).of_tenant(tenant)
    runs = found.state == "open"
    return {"name": stage.name, "share": stage.share, "deadline": round(time.step_s, 3) if runs else None}
