"""Fragments of the schema for steps of workflows: a request's `metadata`, and steps that tools do."""

from __future__ import annotations

from typing import Any

from api.openai.protocol.schemas import LONGEST_NAME, LONGEST_STATE_REF, MOST_PARENTS

Fragment = dict[str, Any]

_NAME: Fragment = {"type": "string", "maxLength": LONGEST_NAME}
METADATA: Fragment = {
    "type": "object",
    "additionalProperties": {"type": "string"},
    "description": "`workflow_id` and `stage` name a request's place in a compound workflow. The answer of a "
    "`step_key` is kept for the tenant's `retention_s`: the same key with the same body gets it again.",
    "properties": {
        "workflow_id": _NAME,
        "stage": _NAME,
        "step_key": _NAME,
        "state_ref": {
            "type": "string",
            "maxLength": LONGEST_STATE_REF,
            "description": "The client's own (ASCII), kept and given back with the step; nobody else reads it.",
        },
        "parents": {
            "type": "array",
            "items": _NAME,
            "maxItems": MOST_PARENTS,
            "description": "The steps that this one depends on, each by its `step_key` or, without one, the id of its "
            "request (`x-request-id`). Those of a workflow with a deadline are checked: they must be among its last "
            "128 steps and have begun before this step first did. Without it, times tell.",
        },
    },
}
TOOL_BODY: Fragment = {
    "type": "object",
    "additionalProperties": False,
    "required": ["kind", "name"],
    "properties": {
        "kind": {"type": "string", "enum": ["tool"]},
        "name": {**_NAME, "description": "Of the tool."},
        "key": {**_NAME, "description": "By which later steps name it, and under which its result is kept."},
        "took": {"type": "number", "minimum": 0, "description": "Seconds. Without it the step is only asked for."},
        "ended_ago": {"type": "number", "minimum": 0, "default": 0, "description": "Seconds before now."},
        "parents": METADATA["properties"]["parents"],
        "input_digest": {**_NAME, "description": "The same for the same input, as the client makes it."},
        "share_result": {
            "type": "boolean",
            "default": False,
            "description": "Steps of this tenant with the same name and `input_digest` may have its result.",
        },
        "result": {"description": "JSON, kept for the tenant's `retention_s`; at most 256 KiB."},
        "state_ref": METADATA["properties"]["state_ref"],
    },
}
TOOL_STEP: Fragment = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "nullable": True, "description": "By which later steps name it: its key, if any."},
        "object": {"type": "string", "enum": ["workflow.step"]},
        "kind": {"type": "string", "enum": ["tool"]},
        "name": {"type": "string"},
        "stored": {"type": "boolean", "description": "It has the result that was kept, and is noted no second time."},
        "kept": {"type": "boolean", "description": "Whether its result is kept now; of a reported step."},
        "result": {"description": "Of a stored step."},
        "state_ref": {"type": "string", "nullable": True, "description": "Of a stored step."},
    },
}
