"""The answer of /v1/responses: a chat completion, whole or streamed, as OpenAI's response object.

The relay translates between measuring and sending, so that an answer that cannot be read does not count as one. Output
items are the message and function calls; the reasoning of engines is left out. Streams:
`api.openai.protocol.response_streams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from api.openai.protocol.translation import UnreadableAnswer
from workers.backends.http import told_count

FIXED: dict[str, Any] = {
    "object": "response",
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "top_logprobs": 0,
    "truncation": "disabled",
}
CUT_SHORT = {"length": "max_output_tokens", "content_filter": "content_filter"}  # finish reason: why it is incomplete
PART: dict[str, Any] = {"type": "output_text", "annotations": [], "logprobs": []}

Item = dict[str, Any]


class ResponseObject:
    """The parts of one response as they become known. `created_at` is epoch seconds."""

    def __init__(self, echo: Mapping[str, Any], request_id: str, created_at: float) -> None:
        self._name = request_id.removeprefix("req-")
        self._head = {"id": f"resp_{self._name}", "created_at": int(created_at), **FIXED, **echo}
        self.finish: str | None = None
        self.usage: Mapping[str, Any] | None = None
        self.whole: dict[str, Any] | None = None  # once it has ended well
        self.broken: dict[str, Any] | None = None  # once it has failed

    @property
    def status(self) -> str:
        return "incomplete" if self.finish in CUT_SHORT else "completed"

    def message(self, index: int, status: str, text: str) -> Item:
        """The answer's text as the output item at `index`; without parts while it is in progress."""
        content = [] if status == "in_progress" else [{**PART, "text": text}]
        name = f"msg_{self._name}_{index}"
        return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}

    def call(self, index: int, status: str, call_id: str, name: str, arguments: str) -> Item:
        known = {"call_id": call_id, "name": name, "arguments": arguments}
        return {"id": f"fc_{self._name}_{index}", "type": "function_call", "status": status, **known}

    def begun(self) -> dict[str, Any]:
        return self._as("in_progress", [])

    def ended(self, output: Sequence[Item]) -> dict[str, Any]:
        self.whole = self._as(self.status, list(output))
        return self.whole

    def failed(self, output: Sequence[Item], error: Mapping[str, Any]) -> dict[str, Any]:
        fault = {"code": error.get("code") or "server_error", "message": error.get("message") or ""}
        self.broken = self._as("failed", output, fault)
        return self.broken

    def _as(self, status: str, output: Sequence[Item], error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        reason = CUT_SHORT.get(self.finish or "") if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": output,
            "usage": _usage(self.usage) if self.usage and status != "in_progress" else None,
        }


def _usage(chat: Mapping[str, Any]) -> dict[str, Any]:
    """The chat's token counts under the names of a response."""
    prompt, output = told_count(chat.get("prompt_tokens")) or 0, told_count(chat.get("completion_tokens")) or 0
    read, written = chat.get("prompt_tokens_details") or {}, chat.get("completion_tokens_details") or {}
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": told_count(read.get("cached_tokens")) or 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": told_count(written.get("reasoning_tokens")) or 0},
        "total_tokens": prompt + output,
    }


class WholeResponse:
    """An answer in one piece."""

    def __init__(self, response: ResponseObject) -> None:
        self.response = response

    def translate(self, raw: bytes) -> bytes:
        """The response for the engine's whole answer. Raises UnreadableAnswer."""
        try:
            return self._translate(raw)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise UnreadableAnswer from error

    def _translate(self, raw: bytes) -> bytes:
        answer = orjson.loads(raw)
        choice = answer["choices"][0]
        self.response.finish = choice.get("finish_reason")
        self.response.usage = answer.get("usage")
        text, calls = choice["message"].get("content") or "", choice["message"].get("tool_calls") or []
        status = self.response.status
        output = [self.response.message(0, status, text)] if text or not calls else []
        for call in calls:
            function = call["function"]
            known = (call["id"], function["name"], function.get("arguments") or "")
            output.append(self.response.call(len(output), status, *known))
        return orjson.dumps(self.response.ended(output))
