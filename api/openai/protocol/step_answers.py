"""The answer of a step as it is kept: whole, in the engines' API, whether it was streamed or not; and sent again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from workers.backends.base import Usage

Choice = dict[str, Any]


class Captured:
    """What an engine sent of an answer, as far as it is not too large to be kept."""

    __slots__ = ("_most", "_raw", "too_large")

    def __init__(self, most: int) -> None:
        self._most = most
        self._raw = bytearray()
        self.too_large = False

    def add(self, raw: bytes) -> None:
        if self.too_large:
            return
        self._raw += raw
        if len(self._raw) > EVENTS * self._most:
            self.too_large, self._raw = True, bytearray()

    def whole(self, *, chat: bool, streamed: bool, usage: Usage | None) -> dict[str, Any] | None:
        """The answer; None if it cannot be read."""
        try:
            found = _assembled(bytes(self._raw), chat) if streamed else orjson.loads(self._raw)
            if not isinstance(found["choices"][0], dict):
                return None
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError, ValueError):
            return None
        if usage is not None:
            prompt, completion = usage
            counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            found["usage"] = (found.get("usage") or {}) | counts
        return found if isinstance(found, dict) else None


EVENTS = 64  # times the bytes of a whole answer that its events may take


def _assembled(raw: bytes, chat: bool) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    choice: Choice = {"index": 0, "finish_reason": None}
    choice |= {"message": {"role": "assistant", "content": None}} if chat else {"text": ""}
    for event in raw.split(b"\n\n"):
        if not event.startswith(b"data: ") or event == b"data: [DONE]":
            continue
        chunk = orjson.loads(event[6:])
        for name in ("id", "created", "model", "system_fingerprint"):
            if name in chunk:
                whole.setdefault(name, chunk[name])
        for part in chunk.get("choices", ())[:1]:
            _add(choice, part, chat)
        if chunk.get("usage"):
            whole["usage"] = chunk["usage"]
    return {**whole, "object": "chat.completion" if chat else "text_completion", "choices": [choice]}


def _add(choice: Choice, part: Mapping[str, Any], chat: bool) -> None:
    if chat:
        _merge(choice["message"], part.get("delta") or {})
    else:
        choice["text"] += part.get("text") or ""
    for name in ("finish_reason", "stop_reason"):
        if part.get(name) is not None:
            choice[name] = part[name]
    if part.get("logprobs"):
        choice["logprobs"] = _merged(choice.get("logprobs"), part["logprobs"])


def _merge(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if name == "role":
            message["role"] = value
        elif name == "tool_calls":
            for call in value or ():
                _merge_call(message.setdefault("tool_calls", []), dict(call))
        else:
            message[name] = _merged(message.get(name), value)


def _merge_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Pieces of a call come under its index; the whole answer has none."""
    index = int(call.pop("index", None) or 0)
    while len(calls) <= index:
        calls.append({})
    known = calls[index]
    function = {**(known.get("function") or {})}
    for name, value in (call.pop("function", None) or {}).items():
        function[name] = _merged(function.get(name), value) if name == "arguments" else value
    known.update({name: value for name, value in call.items() if value is not None})
    known["function"] = function


def _merged(known: Any, more: Any) -> Any:
    if known is None or more is None:
        return known if more is None else more
    if isinstance(known, dict) and isinstance(more, dict):
        return {**known, **{name: _merged(known.get(name), value) for name, value in more.items()}}
    if isinstance(known, str) and isinstance(more, str):
        return known + more
    return [*known, *more] if isinstance(known, list) and isinstance(more, list) else more


def events_of(whole: Mapping[str, Any], *, chat: bool, keep_usage: bool) -> bytes:
    """A stream of the answer: its text in one event. `keep_usage`: with the event that tells its tokens."""
    head = {name: whole[name] for name in ("id", "created", "model", "system_fingerprint") if name in whole}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    choice = dict(whole["choices"][0])
    ended = {name: choice.pop(name) for name in ("finish_reason", "stop_reason") if name in choice}
    if chat:
        message = dict(choice.pop("message"))
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "index": index} for index, call in enumerate(message["tool_calls"])]
        parts = [{**choice, "delta": message, "finish_reason": None}, {"index": 0, "delta": {}, **ended}]
    else:
        parts = [{**choice, **ended}]
    events = [{**head, "choices": [part]} for part in parts]
    if keep_usage:
        events.append({**head, "choices": [], "usage": whole.get("usage")})
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
