"""/v1/responses on its way back: a chat completion, whole or streamed, as OpenAI's response object and its events.

A `Send` around the client's, so that relay, retries and measuring know nothing of it. One output item, the message:
what engines say of their reasoning stays with them. A stream ends with `response.completed` or `response.incomplete`,
or after a failure with `response.failed` and then an `error` event, which clients raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from api.openai.asgi import Message, Send, respond_error
from api.openai.errors import ApiError

FIXED: dict[str, Any] = {
    "object": "response",
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}
CUT_SHORT = {"length": "max_output_tokens", "content_filter": "content_filter"}  # finish reason: why it is incomplete
PART: dict[str, Any] = {"type": "output_text", "annotations": [], "logprobs": []}


class ResponseObject:
    """The parts of one response as they become known. `created_at` is epoch seconds."""

    def __init__(self, echo: Mapping[str, Any], request_id: str, created_at: float) -> None:
        name = request_id.removeprefix("req-")
        self.item_id = f"msg_{name}"
        self.text = ""
        self.finish: str | None = None
        self.usage: Mapping[str, Any] | None = None
        self._head = {"id": f"resp_{name}", "created_at": int(created_at), **FIXED, **echo}

    @property
    def status(self) -> str:
        return "incomplete" if self.finish in CUT_SHORT else "completed"

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [{**PART, "text": self.text}]
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def begun(self) -> dict[str, Any]:
        return self._as("in_progress", [])

    def ended(self) -> dict[str, Any]:
        return self._as(self.status, [self.item(self.status)])

    def failed(self, error: Mapping[str, Any]) -> dict[str, Any]:
        fault = {"code": error.get("code") or "server_error", "message": error.get("message") or ""}
        return self._as("failed", [self.item("incomplete")], fault)

    def _as(self, status: str, output: list[dict[str, Any]], error: Mapping[str, Any] | None = None) -> dict[str, Any]:
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
    """The chat's counts under a response's names."""
    prompt, output = int(chat.get("prompt_tokens") or 0), int(chat.get("completion_tokens") or 0)
    read, written = chat.get("prompt_tokens_details") or {}, chat.get("completion_tokens_details") or {}
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": int(read.get("cached_tokens") or 0)},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": int(written.get("reasoning_tokens") or 0)},
        "total_tokens": prompt + output,
    }


class WholeResponse:
    """A Send for an answer in one piece. Refusals pass as they are."""

    def __init__(self, send: Send, response: ResponseObject) -> None:
        self._send = send
        self._response = response
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message  # its length is known with the body
            return
        if self._start is None:
            await self._send(message)
            return
        headers = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
        try:
            body = self._told(message["body"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            about = [pair for pair in headers if pair[0].startswith(b"x-slackline-")]
            await respond_error(self._send, ApiError("engine_failed", "The engine's answer cannot be read."), about)
            return
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _told(self, raw: bytes) -> bytes:
        answer = orjson.loads(raw)
        choice = answer["choices"][0]
        self._response.text = choice["message"].get("content") or ""
        self._response.finish = choice.get("finish_reason")
        self._response.usage = answer.get("usage")
        return orjson.dumps(self._response.ended())


class StreamedResponse:
    """A Send for a stream: a response's events for each of the chat's. Refusals before it began pass as they are."""

    def __init__(self, send: Send, response: ResponseObject) -> None:
        self._send = send
        self._response = response
        self._texts: list[str] = []
        self._number = 0
        self._streams = False
        self._begun = False
        self._over = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streams = message["status"] == 200
        elif self._streams:
            raw = b"".join(told for event in message["body"].split(b"\n\n") for told in self._told(event))
            if not raw and message.get("more_body"):
                return
            message = {**message, "body": raw}
        await self._send(message)

    def _told(self, event: bytes) -> Iterator[bytes]:
        if not event.startswith(b"data: ") or self._over:
            return
        if not self._begun:
            self._begun = True
            yield from self._begin()
        if event == b"data: [DONE]":
            yield from self._end()
            return
        try:
            chunk = orjson.loads(event[6:])
        except orjson.JSONDecodeError:
            return  # says nothing
        if chunk.get("error"):
            yield from self._fail(chunk["error"])
            return
        self._response.usage = chunk.get("usage") or self._response.usage
        for choice in chunk.get("choices", ())[:1]:
            self._response.finish = choice.get("finish_reason") or self._response.finish
            if text := (choice.get("delta") or {}).get("content"):
                self._texts.append(text)
                yield self._event("response.output_text.delta", **self._where(), delta=text, logprobs=[])

    def _begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response.begun())
        yield self._event("response.in_progress", response=self._response.begun())
        yield self._event("response.output_item.added", output_index=0, item=self._response.item("in_progress"))
        yield self._event("response.content_part.added", **self._where(), part={**PART, "text": ""})

    def _end(self) -> Iterator[bytes]:
        self._over = True
        text = self._response.text = "".join(self._texts)
        status = self._response.status
        yield self._event("response.output_text.done", **self._where(), text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._where(), part={**PART, "text": text})
        yield self._event("response.output_item.done", output_index=0, item=self._response.item(status))
        yield self._event(f"response.{status}", response=self._response.ended())

    def _fail(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        self._over = True
        self._response.text = "".join(self._texts)
        yield self._event("response.failed", response=self._response.failed(error))
        yield self._event("error", **error, error=error)

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._response.item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        told = orjson.dumps({**fields, "type": kind, "sequence_number": self._number})
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), told)


def as_response(send: Send, echo: Mapping[str, Any], request_id: str, created_at: float, *, streamed: bool) -> Send:
    """`send` for a request whose client speaks /v1/responses."""
    response = ResponseObject(echo, request_id, created_at)
    return StreamedResponse(send, response) if streamed else WholeResponse(send, response)
