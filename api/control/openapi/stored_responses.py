"""The data path's calls on stored responses in `docs/openapi.yaml`."""

from __future__ import annotations

from typing import Any

from api.control.openapi.data_path import Fragment, on_data_path, shown
from workers.stored_responses import LISTED, MOST_LISTED, ORDERS

_ID: Fragment = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_RESPONSE: Fragment = {"type": "object", "description": "OpenAI's response object."}
_DELETED: Fragment = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string", "enum": ["response"]},
        "deleted": {"type": "boolean"},
    },
}
_ITEMS: Fragment = {
    "type": "object",
    "properties": {
        "object": {"type": "string", "enum": ["list"]},
        "data": {"type": "array", "items": {"type": "object"}},
        "first_id": {"type": "string", "nullable": True},
        "last_id": {"type": "string", "nullable": True},
        "has_more": {"type": "boolean"},
    },
}


def _query(name: str, description: str, **schema: Any) -> Fragment:
    return {"name": name, "in": "query", "description": description, "schema": schema}


_PAGE = [
    _query("limit", "The most items to list.", type="integer", minimum=1, maximum=MOST_LISTED, default=LISTED),
    _query("order", "`desc`: the newest first.", type="string", enum=sorted(ORDERS), default="desc"),
    _query("after", "Id of the item before the first one to list.", type="string"),
]
_STREAM = [
    _query("stream", "Its events instead, if it was begun with `background` and `stream`.", type="boolean"),
    _query("starting_after", "The `sequence_number` of the last event that is not wanted.", type="integer", minimum=0),
]
_SHOWN = shown("The response, or its events as they come.", _RESPONSE)
_SHOWN["content"]["text/event-stream"] = {"schema": {"type": "string", "description": "Events of the Responses API."}}
_ERRORS = (400, 401, 403, 404, 405, 429, 503)
STORED_RESPONSE_PATHS: Fragment = {
    "/v1/responses/{id}": {
        "get": on_data_path(
            "data_path_response_get",
            "Read or stream a stored response",
            {"200": _SHOWN},
            (*_ERRORS, 410),
            parameters=[_ID, *_STREAM],
        ),
        "delete": on_data_path(
            "data_path_response_delete",
            "Forget a stored response; one in the background ends",
            {"200": shown("It is deleted.", _DELETED)},
            _ERRORS,
            parameters=[_ID],
        ),
    },
    "/v1/responses/{id}/cancel": {
        "post": on_data_path(
            "data_path_response_cancel",
            "End a response in the background",
            {"200": shown("The response, cancelled or as it had ended before.", _RESPONSE)},
            _ERRORS,
            parameters=[_ID],
        )
    },
    "/v1/responses/{id}/input_items": {
        "get": on_data_path(
            "data_path_response_input",
            "List the conversation that a stored response answers",
            {"200": shown("A page of items.", _ITEMS)},
            _ERRORS,
            parameters=[_ID, *_PAGE],
        )
    },
}
