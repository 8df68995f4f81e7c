"""The body of `POST /v1/workflows/{id}/steps`: a step that the client's own tool does or has done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from api.openai.protocol.errors import ApiError
from api.openai.protocol.schemas import Body, dump, flag, load, name_of, parents_of, state_ref_of, wrong

FIELDS = (
    "kind", "name", "key", "took", "ended_ago", "parents", "input_digest", "share_result", "result", "state_ref",
)  # fmt: skip
LONGEST_S = 86_400.0


class ToolReport(NamedTuple):
    """`took_s` None: it has not been done, and is asked for. `result`: JSON, None without one. `digest`: of its input,
    as its client makes it. `shares`: equal steps may have its result, and it that of them."""

    name: str
    key: str
    took_s: float | None
    ago_s: float
    parents: tuple[str, ...] | None
    digest: str
    shares: bool
    result: bytes | None
    state_ref: str


def parse_tool(raw: Body) -> ToolReport:
    """Raises ApiError naming the field."""
    body = load(raw)
    for field in body:
        if field not in FIELDS:
            raise wrong(field[:100], f"is not a field of a reported step; it has {', '.join(FIELDS)}")
    if body.get("kind") != "tool":
        raise wrong("kind", 'must be "tool": the gateway knows of requests itself')
    name, key, digest = _text(body, "name"), _text(body, "key"), _text(body, "input_digest")
    if not name:
        raise wrong("name", "is required: what the tool is called")
    shares = flag(body, "share_result")
    if shares and not digest:
        raise wrong("share_result", "needs input_digest, by which equal steps are known")
    took_s, ago_s = _seconds(body, "took"), _seconds(body, "ended_ago")
    result = dump(body["result"]) if body.get("result") is not None else None
    if took_s is None:
        for field in ("ended_ago", "parents", "result", "state_ref"):
            if body.get(field) is not None:
                raise wrong(field, "needs took: without it the step is asked for, and not reported")
        if not key and not shares:
            raise wrong("took", "is required, but to ask for what is kept, by key or with share_result")
    elif (result is not None or shares) and not key:
        raise wrong("result" if result is not None else "share_result", "needs key, under which the result is kept")
    elif shares and result is None:
        raise wrong("share_result", "needs result")
    parents = parents_of(body.get("parents"), key, "")
    state_ref = state_ref_of(body.get("state_ref"), key, "", "key")
    return ToolReport(name, key, took_s, ago_s or 0.0, parents, digest, shares, result, state_ref)


def _text(body: Mapping[str, Any], field: str) -> str:
    value = body.get(field)
    return "" if value is None else name_of(value, field)


def _seconds(body: Mapping[str, Any], field: str) -> float | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_S:
        raise wrong(field, f"must be a number of seconds from 0 to {LONGEST_S:.0f}")
    return float(value)


def other_input(key: str) -> ApiError:
    told = f"key: step {key!r} of this workflow is kept with another name or input."
    return ApiError("step_exists", told, param="key", final=True)


def of_a_request(key: str) -> ApiError:
    told = f"key: step {key!r} of this workflow is a request's. Give the tool step a key of its own."
    return ApiError("step_exists", told, param="key", final=True)


def of_a_tool(key: str) -> ApiError:
    told = f"metadata.step_key: step {key!r} of this workflow is a tool step. Give the request a key of its own."
    return ApiError("step_exists", told, param="metadata.step_key", final=True)
