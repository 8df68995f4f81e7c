"""Bodies of /v1/responses, as the chat completion that serves them.

Engines of every kind serve chat completions, so a response is one: `input` and `instructions` become its messages,
functions its tools. What else a response can request (OpenAI's own tools, images, stored conversations) is refused by
name, never ignored. Of the fields that this module does not know, the engine gets those in `PASSED_ON`, as
for the other routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from api.openai.protocol.response_items import chat_messages, chat_tools, shown_item
from api.openai.protocol.schemas import (
    Body,
    Count,
    Item,
    KeptInput,
    Parsed,
    dump,
    flag,
    integer,
    load,
    parse_body,
    uncounted,
    wrong,
)
from controller.core.snapshot import ModelConfig

# Fields that would change the answer: the values that request nothing, and why others are refused.
NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "conversation": ((None,), "is not supported: name the last response of it as previous_response_id"),
    "prompt": ((None,), "is not supported: prompt templates are not stored, send instructions and input"),
    "max_tool_calls": ((None,), "is not supported: function calls are made by the client"),
    "include": ((None, []), "is not supported: only the answer is returned"),
    "top_logprobs": ((None, 0), "is not supported: use /v1/chat/completions for log probabilities"),
    "truncation": ((None, "disabled"), "must be disabled: the input is served whole or refused"),
    "service_tier": ((None, "auto", "default"), "is not supported: name an slo_class instead"),
    "stream_options": ((None, {}, {"include_obfuscation": False}), "is not supported beyond include_obfuscation false"),
    "messages": ((None,), "belongs to /v1/chat/completions: name it input"),
    "max_tokens": ((None,), "belongs to other endpoints: name it max_output_tokens"),
    "max_completion_tokens": ((None,), "belongs to other endpoints: name it max_output_tokens"),
}
HINTS = ("safety_identifier", "prompt_cache_key", "prompt_cache_retention")  # change no answer
STATE = ("store", "background", "previous_response_id")
OTHERS = ("instructions", "max_output_tokens", "reasoning", "text", "tools", "tool_choice", "parallel_tool_calls")
MOST_KEPT_BYTES = 128 << 10  # of input with the conversation before it: as much is left for the answer
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class ResponseRequest(NamedTuple):
    """A body of which only that much is known to be right. `previous`: id of the response that it goes on from."""

    body: dict[str, Any]
    previous: str | None


def load_response_request(raw: Body) -> ResponseRequest:
    """Raises ApiError naming the field of the response request."""
    body = load(raw)
    _refuse_unserved(body)
    previous = body.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise wrong("previous_response_id", "must be a string")
    return ResponseRequest(body, previous)


def parse_response_request(
    asked: ResponseRequest,
    models: Mapping[str, ModelConfig],
    count: Count = uncounted,
    *,
    before: Sequence[Item] = (),
    retention_s: int = 0,
) -> Parsed:
    """`before`: items of the conversation that it goes on from. `retention_s`: its tenant's. Raises ApiError naming the
    field of the response request."""
    body = asked.body
    kept = _kept(body, before, retention_s)
    echo = _echo(body) | {
        "background": kept is not None and kept.background,
        "previous_response_id": asked.previous,
        "store": kept is not None,
    }
    dump({"response": echo})  # refuse now what the answer could not repeat
    parsed = parse_body(_as_chat(body, before), models, count, chat=True, shown="input")
    equal = b"response" + parsed.equal if parsed.equal else b""  # a chat's call may not tell its tokens
    return parsed._replace(keep_usage=True, echo=echo, kept=kept, equal=equal)


def _refuse_unserved(body: Mapping[str, Any]) -> None:
    for field, (nothing, why) in NOT_SERVED.items():
        if field in body and body[field] not in nothing:
            raise wrong(field, why)
    for field in ("background", "store"):
        flag(body, field)


def _kept(body: Mapping[str, Any], before: Sequence[Item], retention_s: int) -> KeptInput | None:
    """What is kept of the request with its answer; None if nothing is. A client that does not say gets its response
    kept where its tenant has a retention and the input is not too large."""
    store, background = body.get("store"), bool(body.get("background"))
    if not retention_s:
        none_kept = "no response is kept, since this tenant's retention_s is 0 or the gateway runs without a database"
        if store:
            raise wrong("store", f"must be false: {none_kept}")
        if background:
            raise wrong("background", f"must be false: {none_kept}")
        return None
    if background and store is False:
        raise wrong("background", "needs store: the answer is read from what is kept")
    if store is False:
        return None
    items = [*before, *_items(body.get("input"))]
    if len(dump(items)) > MOST_KEPT_BYTES:
        if store or background:
            told = f"may have at most {MOST_KEPT_BYTES} bytes, with the conversation before it, where it is kept"
            raise wrong("input", f"{told}: send store false")
        return None
    return KeptInput(items, background)


def _items(given: Any) -> list[Item]:
    """The input as a list of items; what is not one is refused later."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [shown_item(item) for item in given if isinstance(item, dict)] if isinstance(given, list) else []


def _as_chat(body: dict[str, Any], before: Sequence[Item]) -> dict[str, Any]:
    """Replaces the response's own fields in `body` by the chat's."""
    messages = chat_messages(body.pop("input", None))
    if before:
        messages = [*chat_messages(list(before)), *messages]
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise wrong("instructions", "must be a string")
        messages.insert(0, {"role": "system", "content": instructions})
    limit = integer(body, "max_output_tokens", 1, 1 << 24)
    reasoning, text = _object(body, "reasoning"), _object(body, "text")
    tools = chat_tools(body)
    for field in (*NOT_SERVED, *HINTS, *STATE, *OTHERS):
        body.pop(field, None)
    body |= {"messages": messages, **tools}
    if limit is not None:
        body["max_completion_tokens"] = limit
    if (effort := _effort(reasoning)) is not None:
        body["reasoning_effort"] = effort
    if (wanted := _format(text)) is not None:
        body["response_format"] = wanted
    return body


def _object(body: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = body.get(field)
    if value is not None and not isinstance(value, dict):
        raise wrong(field, "must be an object")
    return value or {}


def _effort(reasoning: Mapping[str, Any]) -> str | None:
    for field in reasoning:
        if field != "effort" and reasoning[field] is not None:
            raise wrong(f"reasoning.{field[:100]}", "is not supported")
    effort = reasoning.get("effort")
    if effort is not None and effort not in EFFORTS:
        raise wrong("reasoning.effort", f"must be one of {', '.join(EFFORTS)}")
    return effort


def _format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """The chat's `response_format`; None for plain text."""
    for field in text:
        if field != "format" and text[field] is not None:
            raise wrong(f"text.{field[:100]}", "is not supported")
    wanted = text.get("format")
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_schema":
        return {"type": kind, "json_schema": _schema(wanted)}
    if kind not in ("text", "json_object"):
        raise wrong("text.format.type", "must be text, json_object or json_schema")
    return None if kind == "text" else {"type": kind}


def _schema(wanted: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(wanted.get("name"), str) or not wanted["name"]:
        raise wrong("text.format.name", "must be a string")
    if not isinstance(wanted.get("schema"), dict):
        raise wrong("text.format.schema", "must be an object")
    return {key: value for key, value in wanted.items() if key != "type"}


def _echo(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the response object that repeat the request."""
    reasoning = body.get("reasoning") or {}
    text = body.get("text") or {}
    return {
        "model": body.get("model"),
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": reasoning.get("effort") if isinstance(reasoning, dict) else None, "summary": None},
        "temperature": body.get("temperature"),
        "text": text if isinstance(text, dict) and text else {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "user": body.get("user"),
    }
