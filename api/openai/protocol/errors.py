"""Errors as OpenAI clients expect them: one shape, stable codes, the name of the wrong field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from controller.core.errors import SlacklineError
from controller.dispatch.lifecycle import ENDS, Cause
from controller.wording.refusals import ended
from workers.workflows import BY_OPERATOR


class _Kind(NamedTuple):
    status: int
    type: str


KINDS: dict[str, _Kind] = {
    "invalid_json": _Kind(400, "invalid_request_error"),
    "invalid_value": _Kind(400, "invalid_request_error"),
    "invalid_slo": _Kind(400, "invalid_request_error"),
    "context_length_exceeded": _Kind(400, "invalid_request_error"),
    "invalid_api_key": _Kind(401, "authentication_error"),
    "permission_denied": _Kind(403, "permission_error"),
    "model_not_found": _Kind(404, "invalid_request_error"),
    "not_found": _Kind(404, "invalid_request_error"),
    "method_not_allowed": _Kind(405, "invalid_request_error"),
    "workflow_exists": _Kind(409, "invalid_request_error"),
    "step_exists": _Kind(409, "invalid_request_error"),
    "fork_exists": _Kind(409, "invalid_request_error"),
    "request_timeout": _Kind(408, "invalid_request_error"),
    "events_dropped": _Kind(410, "invalid_request_error"),
    "request_too_large": _Kind(413, "invalid_request_error"),
    "ends_engines": _Kind(422, "invalid_request_error"),
    "rate_limit_exceeded": _Kind(429, "rate_limit_error"),
    "slo_infeasible": _Kind(429, "slo_error"),
    "cancelled": _Kind(499, "cancelled_error"),
    "internal_error": _Kind(500, "server_error"),
    "engine_failed": _Kind(502, "server_error"),
    "configuration_stale": _Kind(503, "server_error"),
    "no_capacity": _Kind(503, "server_error"),
    "shutting_down": _Kind(503, "server_error"),
    "responses_unavailable": _Kind(503, "server_error"),
    "workflows_unavailable": _Kind(503, "server_error"),
    "waiting_time_exceeded": _Kind(504, "slo_error"),
}


class ApiError(SlacklineError):
    """An error that the client gets. `code` is a key of KINDS; an unknown one has status 503.

    `final`: the same request would be refused again, so clients should not retry it.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.final = final
        self.about: list[tuple[bytes, bytes]] = []  # x-slackline-* headers of the request's record, if it has one
        self.status, self.type = KINDS.get(code, _Kind(503, "server_error"))

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def event(self) -> bytes:
        """The error as the last event of a stream. No `[DONE]` follows, since the answer is incomplete."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of its record, `Retry-After` in whole seconds (at least one), and whether a retry is useless."""
        found = [*self.about]
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        if self.final:  # OpenAI's clients retry every 429, twice and after Retry-After, unless this header says not to
            found.append((b"x-should-retry", b"false"))
        return found


def shutting_down() -> ApiError:
    return ApiError(ENDS[Cause.SHUTDOWN].code, ended(Cause.SHUTDOWN), retry_after_s=2)


def key_revoked() -> ApiError:
    return ApiError(ENDS[Cause.KEY_REVOKED].code, ended(Cause.KEY_REVOKED))


def workflow_cancelled(workflow: str, by: str) -> ApiError:
    """`by`: of `workers.workflows`. Sent again it would be refused again."""
    who = "an operator" if by == BY_OPERATOR else "its client"
    told = f"The workflow {workflow!r} was cancelled by {who}."
    return ApiError("cancelled", told, param="metadata.workflow_id", final=True)


def config_stale() -> ApiError:
    """The gateway cannot tell whether the key was revoked meanwhile."""
    message = "The gateway has not been able to confirm its configuration for too long, so it accepts no API key."
    return ApiError("configuration_stale", message, retry_after_s=5)


MOST_SAID = 2_000  # characters of an engine's error message
_REFUSED = {404: "model_not_found", 413: "request_too_large"}


def engine_refusal(status: int, body: bytes) -> ApiError:
    """An engine's 4xx in the shape of all other errors, with the engine's message, field and status."""
    told = _engine_error(body)
    param = told.get("param")
    text = told["message"].strip() if told else f"The engine refused the request ({status})."
    code = _REFUSED.get(status, "invalid_value")
    error = ApiError(code, text[:MOST_SAID], param=param if isinstance(param, str) else None)
    error.status = status
    return error


def _engine_error(body: bytes) -> Mapping[str, Any]:
    """The error object, of OpenAI's shape or the one of older vLLM and SGLang; empty for anything else: at an engine's
    address may be another service, whose pages are nothing for tenants."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(said, dict):
        return {}
    told = said if said.get("object") == "error" else said.get("error")
    if not isinstance(told, dict) or not isinstance(told.get("type"), str):
        return {}
    message = told.get("message")
    return told if isinstance(message, str) and message.strip() else {}
