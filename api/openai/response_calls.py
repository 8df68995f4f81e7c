"""`/v1/responses/{id}`: read, stream, delete or cancel a stored response, and list its input; with the tenant's key.

Another tenant's response does not exist.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import orjson

from api.openai.asgi import Receive, Scope, Send, header, read_body, respond
from api.openai.gateway import Gateway
from api.openai.in_flight import RESPONSES
from api.openai.protocol.errors import ApiError
from api.openai.protocol.schemas import wrong
from api.openai.tenants import Held
from workers.stored_responses import LISTED, MOST_LISTED, ORDERS

CANCEL = "/cancel"
INPUT = "/input_items"
BODY_BYTES = 16 << 10
STARTING_AFTER = "starting_after"
ON, OFF = "true", "false"
NOTHING = (("stream", OFF), ("include_obfuscation", OFF))  # what any of the calls may ask for


async def stored_response(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    """GET reads it, streamed or not, or its `/input_items`, DELETE forgets it, POST to its `/cancel` ends it in the
    background."""
    key = header(scope, b"authorization")
    caller = gateway.caller(key)
    tenant, method = caller.tenant.name, scope["method"]
    gateway.quotas.call(tenant, gateway.clock())
    name = scope["path"][len(RESPONSES) + 1 :]
    responses = gateway.responses
    shown: dict[str, Any]
    if method == "GET" and name.endswith(INPUT):
        asked = _asked(scope, ("after", "limit", "order"))
        found = await responses.find(tenant, name.removesuffix(INPUT))
        shown = _page(found.input, asked)
    elif method == "GET":
        number = _starting_after(_asked(scope, ("stream", STARTING_AFTER)))
        if number is not None:
            await gateway.readers.tell_after(tenant, name, number, caller.key_id, receive, send)
            return
        shown = (await responses.find(tenant, name)).response
    elif method == "DELETE":
        await responses.delete(tenant, name)
        shown = {"id": name, "object": "response", "deleted": True}
    elif method == "POST" and name.endswith(CANCEL):
        held = Held(gateway.quotas, caller.tenant, gateway.clock())
        try:
            await read_body(scope, receive, BODY_BYTES, held.add, held.turns)
        finally:
            held.give_back()
        tenant = gateway.caller(key).tenant.name  # again: the key may have been revoked while the body came
        shown = await responses.cancel(tenant, name.removesuffix(CANCEL))
    else:
        told = "Use GET of a response or its /input_items, DELETE of it, or POST to its /cancel."
        raise ApiError("method_not_allowed", told)
    await respond(send, 200, orjson.dumps(shown))


def _starting_after(asked: dict[str, str]) -> int | None:
    """The number of the last event that the client has, -1 for none; None: it wants no stream. Raises ApiError."""
    stream, after = asked.get("stream", OFF), asked.get(STARTING_AFTER)
    if stream not in (ON, OFF):
        raise wrong("stream", f"must be {ON} or {OFF}")
    if after is not None and stream == OFF:
        raise wrong(STARTING_AFTER, "needs stream true")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 16):
        raise wrong(STARTING_AFTER, "must be a sequence number: a whole number of at least 0")
    return None if stream == OFF else int(after or -1)


def _asked(scope: Scope, known: tuple[str, ...]) -> dict[str, str]:
    """The fields of the query. Raises ApiError for one that is not served."""
    try:
        query = scope.get("query_string", b"").decode("latin-1")
        fields = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=16))
    except ValueError:
        raise wrong("query", "has too many fields") from None
    for field, value in fields.items():
        if field not in known and (field, value) not in NOTHING:
            raise wrong(field[:100], "is not supported here")
    return fields


def _page(items: list[dict[str, Any]], asked: dict[str, str]) -> dict[str, Any]:
    order, most = asked.get("order", "desc"), asked.get("limit", str(LISTED))
    if order not in ORDERS:
        raise wrong("order", f"must be one of {', '.join(ORDERS)}")
    if not (most.isascii() and most.isdigit() and len(most) < 4 and 1 <= int(most) <= MOST_LISTED):
        raise wrong("limit", f"must be a number from 1 to {MOST_LISTED}")
    found = items if order == "asc" else items[::-1]
    if (after := asked.get("after")) is not None:
        at = next((at for at, item in enumerate(found) if item["id"] == after), None)
        if at is None:
            raise wrong("after", "is no item of this response")
        found = found[at + 1 :]
    page = found[: int(most)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": len(found) > len(page)}
