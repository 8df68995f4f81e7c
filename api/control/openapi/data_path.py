"""The gateway's `/v1/*` endpoints as OpenAPI fragments, which `document` merges into the control API's document.

The gateway is not a Django process, so this part cannot be generated from views. `tests/api/control/test_schema.py`
compares fields and codes with the gateway's modules.
"""

from __future__ import annotations

from typing import Any

from api.control.openapi.steps import METADATA, TOOL_BODY, TOOL_STEP
from api.openai.protocol.schemas import LONGEST_CHECKPOINT_S, LONGEST_NAME
from api.openai.protocol.workflow_bodies import LARGEST_SHARE, MOST_BRANCHES, MOST_STAGES
from controller.slo.classes import MOST_STEPS

Fragment = dict[str, Any]

GATEWAY_SERVER: Fragment = {
    "url": "{gateway}",
    "description": "The gateway (data path), a process of its own.",
    "variables": {"gateway": {"default": "http://127.0.0.1:8080"}},
}


def _seconds(description: str, example: float) -> Fragment:
    return {"type": "number", "exclusiveMinimum": True, "minimum": 0, "description": description, "example": example}


SLO_FIELDS: Fragment = {
    "target_ttft": _seconds("Time to the first token, seconds.", 2.0),
    "target_tbt": _seconds(
        "Mean time per output token after the first, seconds; also the pace by which token goodput is counted.", 0.1
    ),
    "deadline": _seconds("Time for the whole answer, seconds from arrival.", 30.0),
    "thinking_deadline": _seconds(
        "Time to the first token that is not reasoning, seconds from arrival; in place of `target_ttft`. Chats and "
        "responses that are streamed.",
        10.0,
    ),
    "workflow_deadline": _seconds(
        "Time for the whole workflow `metadata.workflow_id`, seconds from its first request. The first one that is "
        "given counts; later requests of the workflow, at any gateway, get their share of what is left as their "
        "`deadline`.",
        120.0,
    ),
    "workflow_steps_left": {
        "type": "integer",
        "minimum": 1,
        "maximum": MOST_STEPS,
        "default": 1,
        "description": "Requests of the workflow that follow one another from here to its end, this one included. The "
        "time that is left is shared evenly among them.",
    },
    "checkpoint": {
        "type": "number",
        "minimum": 1,
        "maximum": LONGEST_CHECKPOINT_S,
        "description": "Seconds for which the KV of this step (`metadata.step_key`) stays at its engine, so that the "
        "workflow can be forked there.",
    },
    "branch": {
        "type": "string",
        "maxLength": LONGEST_NAME,
        "description": "The branch of a fork that the request belongs to: it goes on from the KV of the forked step.",
    },
    "share_call": {
        "type": "boolean",
        "default": False,
        "description": "Whether the request may get the answer of an equal one of the same tenant that is in flight at "
        "the same gateway, and equal ones its own. Needs `temperature` 0 or a `seed`.",
    },
    "waiting_time": {
        "type": "number",
        "minimum": 0,
        "description": "Seconds; the request ends with `waiting_time_exceeded` if no engine has it by then. 0: "
        "no waiting.",
        "example": 5.0,
    },
    "slo_class": {
        "type": "string",
        "description": "Name of an SLO class, which gives the targets that the request does not set itself.",
    },
    "priority": {
        "type": "integer",
        "minimum": 0,
        "description": "0 is the highest. The priority mapping turns it into targets if the request names no "
        "class. It is not "
        "passed to the engine, which gets a rank that follows from the targets.",
    },
}
_NAME: Fragment = {"type": "string", "maxLength": LONGEST_NAME}
COMMON: Fragment = {
    "model": {"type": "string", "description": "A served model's public name or one of its aliases."},
    "stream": {"type": "boolean", "default": False},
    **SLO_FIELDS,
    "metadata": METADATA,
}
MAX_TOKENS: Fragment = {"max_tokens": {"type": "integer", "minimum": 1}}

RESPONSE_HEADERS: Fragment = {
    "x-slackline-request-id": {"description": "Id of the request's record.", "schema": {"type": "string"}},
    "x-slackline-class": {"description": "SLO class applied; empty if none.", "schema": {"type": "string"}},
    "x-slackline-instance": {"description": "The engine that served it.", "schema": {"type": "string"}},
    "x-slackline-queue-ms": {"description": "Time in the gateway's queue, milliseconds.", "schema": {"type": "number"}},
    "x-slackline-shared": {
        "description": "Of a request that got the answer of another one's call (`share_call`): the id of that request.",
        "schema": {"type": "string"},
    },
    "x-slackline-stored": {
        "description": "Of a request that got the answer of its step (`metadata.step_key`): the id of the request that "
        "computed it.",
        "schema": {"type": "string"},
    },
    "x-request-id": {"description": "The same id under OpenAI's name.", "schema": {"type": "string"}},
}
QUOTA_HEADERS: Fragment = {
    f"x-ratelimit-{name}-{what}": {"description": meaning.format(what), "schema": {"type": kind}}
    for what in ("requests", "tokens")
    for name, kind, meaning in (
        ("limit", "integer", "The tenant's quota of {} a minute; absent without one."),
        ("remaining", "integer", "What is left of the quota of {} at this gateway."),
        ("reset", "string", "Time until the whole quota of {} is available again, such as `1.250s`."),
    )
}
RETRY_AFTER: Fragment = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
SHOULD_RETRY: Fragment = {
    "x-should-retry": {
        "description": "`false` if the targets cannot be met even on an idle instance: a retry would be refused again.",
        "schema": {"type": "string", "enum": ["false"]},
    }
}

# By status: codes and their meaning. Codes must not be renamed, since clients match on them.
ERROR_CODES: dict[int, dict[str, str]] = {
    400: {
        "invalid_json": "The body is not a JSON object.",
        "invalid_value": "A field is of the wrong type or out of range; `param` names it.",
        "invalid_slo": "An SLO field is of the wrong type, out of range or contradicts another; `param` names it.",
        "context_length_exceeded": "Prompt and `max_tokens` exceed the model's context.",
    },
    401: {"invalid_api_key": "No API key, or one that is unknown, expired or revoked, or whose tenant is suspended."},
    403: {
        "permission_denied": "The key lacks the scope for the data path, or an entitlement of the tenant does "
        "not allow a field; `param` "
        "names it."
    },
    404: {
        "model_not_found": "No served model has this name or alias.",
        "not_found": "There is no such path, or this tenant has no such workflow with a deadline.",
    },
    405: {"method_not_allowed": "The path exists, with another method."},
    409: {
        "workflow_exists": "The tenant has a workflow with this id, with another deadline or stages, or cancelled.",
        "step_exists": "The step `metadata.step_key` of this workflow has an answer to another body, or is a "
        "tool step. Of a tool step: its `key` is that of a step with another name or `input_digest`, or of a request's "
        "step.",
        "fork_exists": "The workflow has a fork with this `fork_id` at another step (`param`: `fork_id`) or with "
        "another number of branches (`branches`).",
    },
    410: {"events_dropped": "The events of this stored response are not kept any more; the response is."},
    408: {"request_timeout": "The body did not arrive within 30 seconds."},
    413: {"request_too_large": "The body has more than 2 MB."},
    422: {
        "ends_engines": "Engines died while they computed this request, or one with the same body before; do not send "
        "it again."
    },
    429: {
        "rate_limit_exceeded": "A quota of the tenant or its share of the queue is used up, the queue is full, or "
        "calls on stored responses and workflows come too often.",
        "slo_infeasible": "No instance can meet the targets, not even if it is sent now.",
    },
    499: {"cancelled": "An operator cancelled the request in the queue, or its workflow was cancelled."},
    500: {"internal_error": "The gateway could not schedule the request."},
    502: {
        "engine_failed": "The engine failed during the answer. A stream that has begun with 200 ends with this "
        "as its last event."
    },
    503: {
        "no_capacity": "No instance serves this model and none starts in time, or the request could not be "
        "retried on another.",
        "configuration_stale": "PostgreSQL has not confirmed the gateway's API keys for too long.",
        "responses_unavailable": "Redis is unavailable, so stored responses cannot be read or changed.",
        "workflows_unavailable": "Redis is unavailable, so workflows cannot be read or changed. Requests are served.",
        "shutting_down": "The gateway is shutting down; send the request again. A stream that has begun with "
        "200 ends with this as "
        "its last event.",
    },
    504: {"waiting_time_exceeded": "The request was not sent to an engine within `waiting_time`."},
}


GENERATION_ERRORS = tuple(ERROR_CODES)


def _body(
    required: list[str],
    properties: Fragment,
    rest: str = "OpenAI's body plus the SLO fields, each optional. Of the fields not named here the engine gets "
    "those that "
    "Slackline knows (sampling, stops, tools, structured output and others); the rest is dropped.",
) -> Fragment:
    schema = {
        "type": "object",
        "required": ["model", *required],
        "properties": {**COMMON, **properties},
        "additionalProperties": True,
        "description": rest,
    }
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _ok(description: str, events: str) -> Fragment:
    stream = {"schema": {"type": "string", "description": events}}
    whole = {"schema": {"type": "object", "additionalProperties": True}}
    content = {"application/json": whole, "text/event-stream": stream}
    return {"description": description, "headers": RESPONSE_HEADERS | QUOTA_HEADERS, "content": content}


def _errors(statuses: tuple[int, ...]) -> Fragment:
    schema = {"$ref": "#/components/schemas/DataPathError"}
    answers = {}
    for status in statuses:
        text = "; ".join(f"`{code}`: {meaning}" for code, meaning in ERROR_CODES[status].items())
        answers[str(status)] = {"description": text, "content": {"application/json": {"schema": schema}}}
        if status in (429, 503):
            answers[str(status)]["headers"] = RETRY_AFTER | (SHOULD_RETRY | QUOTA_HEADERS if status == 429 else {})
    return answers


def _generation(
    operation: str,
    summary: str,
    body: Fragment,
    answer: str = "The completion, whole or streamed.",
    events: str = "Server-sent events, ended by `data: [DONE]`.",
) -> Fragment:
    post = {
        "operationId": operation,
        "summary": summary,
        "tags": ["data path"],
        "security": [{"apiKey": []}],
        "requestBody": body,
        "responses": {"200": _ok(answer, events), **_errors(GENERATION_ERRORS)},
        "servers": [GATEWAY_SERVER],
    }
    return {"post": post}


def _models() -> Fragment:
    whole = {"application/json": {"schema": {"type": "object", "additionalProperties": True}}}
    get = {
        "operationId": "data_path_models",
        "summary": "Models that this tenant may use, in the shape of OpenAI's list",
        "tags": ["data path"],
        "security": [{"apiKey": []}],
        "responses": {"200": {"description": "The list.", "content": whole}, **_errors((401, 403, 405, 503))},
        "servers": [GATEWAY_SERVER],
    }
    return {"get": get}


MESSAGES: Fragment = {"type": "array", "minItems": 1, "items": {"type": "object", "additionalProperties": True}}
PROMPT: Fragment = {
    "description": "Text, or token ids.",
    "oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}],
}

INPUT: Fragment = {
    "description": "Text, or messages of text, function calls and their output.",
    "oneOf": [{"type": "string"}, MESSAGES],
}

CHAT: Fragment = {
    **MAX_TOKENS,
    "messages": MESSAGES,
    "max_completion_tokens": {
        "type": "integer",
        "minimum": 1,
        "description": "OpenAI's newer name for `max_tokens`; takes precedence if both are given.",
    },
}

RESPONSE: Fragment = {
    "input": INPUT,
    "instructions": {"type": "string"},
    "max_output_tokens": {"type": "integer", "minimum": 1},
    "text": {"type": "object", "description": "`format`: text, json_object or json_schema."},
    "reasoning": {"type": "object", "description": "`effort`, for models that reason."},
    "store": {
        "type": "boolean",
        "description": "Keep the response for the tenant's retention. Absent: true where the tenant has one.",
    },
    "previous_response_id": {"type": "string", "description": "A stored response whose conversation comes before."},
    "background": {
        "type": "boolean",
        "description": "Answer at once with a response in progress, which is read by its id; or, with `stream`, with "
        "events that can be read again. Needs a retention.",
    },
    "tools": {"type": "array", "description": "Functions, for engines that call them.", "items": {"type": "object"}},
}
RESPONSE_REST = (
    "OpenAI's body plus the SLO fields, each optional. What is not text, tools other than functions, and what is not "
    "served is refused with `invalid_value` naming the field: conversation, prompt, max_tool_calls, "
    "include, top_logprobs, truncation (but disabled), service_tier (but auto and default). Of the fields not named "
    "here the engine gets those that Slackline knows; the rest is dropped."
)

WORKFLOW_BODY: Fragment = {
    "type": "object",
    "required": ["deadline"],
    "additionalProperties": False,
    "properties": {
        "id": {
            **_NAME,
            "minLength": 1,
            "description": "The `metadata.workflow_id` of its requests; generated if absent.",
        },
        "deadline": _seconds("Time for the whole workflow, seconds from now.", 120.0),
        "stages": {
            "type": "array",
            "minItems": 1,
            "maxItems": MOST_STAGES,
            "description": "In the order in which they follow. A request whose `metadata.stage` is one of them gets "
            "the stage's share of the time that is left, as against the stages after it; `workflow_steps_left` of the "
            "request comes before.",
            "items": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {
                    "name": {**_NAME, "minLength": 1},
                    "share": {
                        "type": "number",
                        "minimum": 0,
                        "exclusiveMinimum": True,
                        "maximum": LARGEST_SHARE,
                        "default": 1,
                        "description": "Of the time, relative to the other stages.",
                    },
                },
            },
        },
    },
}
_EPOCH: Fragment = {"type": "number", "nullable": True, "description": "Epoch seconds."}
_COUNT: Fragment = {"type": "integer", "minimum": 0}
WORKFLOW: Fragment = {
    "type": "object",
    "description": "A workflow. Counts of requests at other gateways are up to a second old.",
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string", "enum": ["workflow"]},
        "state": {"type": "string", "enum": ["open", "late", "cancelled"]},
        "created_at": _EPOCH,
        "deadline": {"type": "number", "nullable": True, "description": "Seconds from `created_at`."},
        "deadline_left": {"type": "number", "description": "Seconds; negative once it is late."},
        "cancelled_at": _EPOCH,
        "cancelled_by": {"type": "string", "nullable": True, "enum": ["tenant", "operator", None]},
        "requests": {**_COUNT, "description": "Its requests that were admitted."},
        "answered": _COUNT,
        "failed": {**_COUNT, "description": "Requests that were cut, expired, or ended without an answer."},
        "running": {**_COUNT, "description": "Requests whose end is not known."},
        "output_tokens": {**_COUNT, "description": "Of all answers."},
        "goodput_tokens": {**_COUNT, "description": "The same while `in_time`, otherwise 0: all or nothing."},
        "in_time": {
            "type": "boolean",
            "description": "So far, every request that ended was answered, and by the deadline. Once the deadline has "
            "passed: whether all were.",
        },
        "stages": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "share": {"type": "number"},
                    "deadline": {
                        "type": "number",
                        "nullable": True,
                        "description": "Seconds that a request of this stage would get now. Null unless the workflow "
                        "is open.",
                    },
                },
            },
        },
    },
}


def _workflow(operation: str, summary: str, errors: tuple[int, ...], **more: Any) -> Fragment:
    schema = {"$ref": "#/components/schemas/DataPathWorkflow"}
    found = {"description": "The workflow.", "content": {"application/json": {"schema": schema}}}
    described = more.pop("also", {})
    return {
        "operationId": operation,
        "summary": summary,
        "tags": ["data path"],
        "security": [{"apiKey": []}],
        **more,
        "responses": {"200": found, **dict.fromkeys(described, found), **_errors(errors)},
        "servers": [GATEWAY_SERVER],
    }


def on_data_path(operation: str, summary: str, found: Fragment, errors: tuple[int, ...], **more: Any) -> Fragment:
    return {
        "operationId": operation,
        "summary": summary,
        "tags": ["data path"],
        "security": [{"apiKey": []}],
        **more,
        "responses": {**found, **_errors(errors)},
        "servers": [GATEWAY_SERVER],
    }


def shown(description: str, schema: Fragment) -> Fragment:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


FORK_BODY: Fragment = {
    "type": "object",
    "additionalProperties": False,
    "required": ["step", "branches"],
    "properties": {
        "step": {**_NAME, "description": "The `metadata.step_key` of a step that had a `checkpoint`."},
        "branches": {"type": "integer", "minimum": 1, "maximum": MOST_BRANCHES},
        "fork_id": {
            **_NAME,
            "description": "The id of the fork, of your choice, in its workflow. While it has open branches, the "
            "same id gets the same fork, after a crash for example. Without one each call makes another fork.",
        },
    },
}
FORK: Fragment = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "`fork_id`, or one that was made."},
        "object": {"type": "string", "enum": ["workflow.fork"]},
        "workflow": {"type": "string"},
        "step": {"type": "string"},
        "branches": {
            "type": "array",
            "items": {"type": "string"},
            "description": "What its requests name as `branch`.",
        },
        "open": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Those of its branches that have not ended.",
        },
        "checkpoint": {
            "type": "string",
            "enum": ["held", "lost"],
            "description": "Whether the KV of the step is still at its engine. If not, branches are computed.",
        },
        "lease": {"type": "number", "description": "Seconds for which it stays after each request of a branch."},
    },
}
ENDED_BRANCH: Fragment = {
    "type": "object",
    "properties": {
        "object": {"type": "string", "enum": ["workflow.branch"]},
        "deleted": {"type": "boolean"},
    },
}
FORGOTTEN_STEPS: Fragment = {
    "type": "object",
    "properties": {
        "object": {"type": "string", "enum": ["workflow.steps"]},
        "deleted": {"type": "integer", "minimum": 0},
    },
}
_WORKFLOW_ID: Fragment = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
WORKFLOW_PATHS: Fragment = {
    "/v1/workflows": {
        "post": _workflow(
            "data_path_workflow_begin",
            "Begin a workflow with one deadline: 201, or 200 if it was begun before, unchanged",
            (400, 401, 403, 405, 408, 409, 413, 429, 503),
            also=("201",),
            requestBody={"required": True, "content": {"application/json": {"schema": WORKFLOW_BODY}}},
        )
    },
    "/v1/workflows/{id}": {
        "get": _workflow(
            "data_path_workflow_get", "Read a workflow", (401, 403, 404, 405, 429, 503), parameters=[_WORKFLOW_ID]
        )
    },
    "/v1/workflows/{id}/cancel": {
        "post": _workflow(
            "data_path_workflow_cancel",
            "Cancel a workflow: its requests end at every gateway, and later ones are refused",
            (401, 403, 404, 405, 429, 503),
            parameters=[_WORKFLOW_ID],
        )
    },
    "/v1/workflows/{id}/steps": {
        "post": on_data_path(
            "data_path_workflow_step_report",
            "Report a tool step, or ask for the result that is kept of one",
            {
                "201": shown("The step was noted.", TOOL_STEP),
                "200": shown("What is kept of it, or that nothing is.", TOOL_STEP),
            },
            (400, 401, 403, 404, 405, 408, 409, 413, 429, 499, 503),
            parameters=[_WORKFLOW_ID],
            requestBody={"required": True, "content": {"application/json": {"schema": TOOL_BODY}}},
        ),
        "delete": on_data_path(
            "data_path_workflow_steps_forget",
            "Forget the answers that are kept of a workflow's steps",
            {"200": shown("How many were deleted.", FORGOTTEN_STEPS)},
            (401, 403, 405, 429, 503),
            parameters=[_WORKFLOW_ID],
        ),
    },
    "/v1/workflows/{id}/fork": {
        "post": on_data_path(
            "data_path_workflow_fork",
            "Fork a workflow at a step: branches that go on from its KV",
            {
                "200": shown("It was forked before with this `fork_id`. Its lease begins again.", FORK),
                "201": shown("The fork.", FORK),
            },
            (400, 401, 403, 404, 405, 408, 409, 413, 429, 503),
            parameters=[_WORKFLOW_ID],
            requestBody={"required": True, "content": {"application/json": {"schema": FORK_BODY}}},
        )
    },
    "/v1/workflows/{id}/branches/{branch}": {
        "delete": on_data_path(
            "data_path_workflow_branch_end",
            "End a branch; after the last one of all forks of a step its KV is freed",
            {"200": shown("It has ended.", ENDED_BRANCH)},
            (401, 403, 404, 405, 429, 503),
            parameters=[_WORKFLOW_ID, {**_WORKFLOW_ID, "name": "branch"}],
        )
    },
}

PATHS: Fragment = {
    **WORKFLOW_PATHS,
    "/v1/chat/completions": _generation(
        "data_path_chat_completions", "Chat completion under an SLO", _body(["messages"], CHAT)
    ),
    "/v1/completions": _generation(
        "data_path_completions", "Text completion under an SLO", _body(["prompt"], {**MAX_TOKENS, "prompt": PROMPT})
    ),
    "/v1/responses": _generation(
        "data_path_responses",
        "Response under an SLO, served as a chat completion",
        _body(["input"], RESPONSE, RESPONSE_REST),
        "The response object, whole or as events; `store` says whether it is kept. In the background it comes at once.",
        "Events of the Responses API, ended by `response.completed`, `response.incomplete`, or `response.failed` and "
        "then `error`.",
    ),
    "/v1/models": _models(),
}

COMPONENTS: Fragment = {
    "DataPathWorkflow": WORKFLOW,
    "DataPathError": {
        "type": "object",
        "description": "OpenAI's error shape. After the first token of a stream it arrives as an event.",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": "string", "nullable": True, "description": "The field that is wrong."},
                    "code": {"type": "string", "description": "Error code; see each response."},
                },
            }
        },
    },
}
