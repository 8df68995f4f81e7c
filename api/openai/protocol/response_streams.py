"""A streamed /v1/responses: a response's events for each event of the chat completion that serves it.

One output item is open at a time, the message or a function call. A stream ends with `response.completed` or
`response.incomplete`, or after a failure with `response.failed` and then an `error` event, which clients raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from api.openai.protocol.response_objects import PART, Item, ResponseObject, WholeResponse
from api.openai.protocol.translation import UnreadableAnswer

DELTAS = (b"event: response.output_text.delta", b"event: response.function_call_arguments.delta")

Event = tuple[str, dict[str, Any]]


class OpenMessage:
    """The open item that text is added to."""

    def __init__(self, response: ResponseObject, index: int) -> None:
        self._response, self._index = response, index
        self._texts: list[str] = []
        self._where = {"item_id": self.item("in_progress")["id"], "output_index": index, "content_index": 0}

    def item(self, status: str) -> Item:
        return self._response.message(self._index, status, "".join(self._texts))

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._index, "item": self.item("in_progress")}
        yield "response.content_part.added", {**self._where, "part": {**PART, "text": ""}}

    def more(self, text: str) -> Event:
        self._texts.append(text)
        return "response.output_text.delta", {**self._where, "delta": text, "logprobs": []}

    def end(self, status: str) -> Iterator[Event]:
        text = "".join(self._texts)
        yield "response.output_text.done", {**self._where, "text": text, "logprobs": []}
        yield "response.content_part.done", {**self._where, "part": {**PART, "text": text}}
        yield "response.output_item.done", {"output_index": self._index, "item": self.item(status)}


class OpenCall:
    """The open item that the arguments of a function call are added to. `number`: the chat's index of the call."""

    def __init__(self, response: ResponseObject, index: int, number: int, call_id: str, name: str) -> None:
        self.number = number
        self._response, self._index = response, index
        self._call_id, self._name = call_id, name
        self._arguments: list[str] = []

    def item(self, status: str) -> Item:
        return self._response.call(self._index, status, self._call_id, self._name, "".join(self._arguments))

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._index, "item": self.item("in_progress")}

    def more(self, arguments: str) -> Event:
        self._arguments.append(arguments)
        where = {"item_id": self.item("in_progress")["id"], "output_index": self._index}
        return "response.function_call_arguments.delta", {**where, "delta": arguments}

    def end(self, status: str) -> Iterator[Event]:
        item = self.item(status)
        known = {"item_id": item["id"], "output_index": self._index, "name": self._name}
        yield "response.function_call_arguments.done", {**known, "arguments": item["arguments"]}
        yield "response.output_item.done", {"output_index": self._index, "item": item}


class StreamedResponse:
    """A stream, piece by piece."""

    def __init__(self, response: ResponseObject) -> None:
        self.response = response
        self._output: list[Item] = []
        self._open: OpenMessage | OpenCall | None = None
        self._written: list[bytes] = []  # events not yet returned
        self._number = 0
        self._begun = False
        self._over = False

    def begin(self) -> bytes:
        """The first events, for a client that is to have them before the answer begins."""
        for kind, fields in self._begin():
            self._write(kind, fields)
        return self._told()

    def translate(self, raw: bytes) -> bytes:
        """A response's events for whole events of the chat, or for an error of the gateway, which ends the stream.

        Raises UnreadableAnswer; events that could be read before are then sent with the error.
        """
        try:
            for event in raw.split(b"\n\n"):
                for kind, fields in self._events(event):
                    self._write(kind, fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableAnswer from error
        return self._told()

    def _told(self) -> bytes:
        told, self._written = b"".join(self._written), []
        return told

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        told = orjson.dumps({**fields, "type": kind, "sequence_number": self._number})
        self._number += 1
        self._written.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), told))

    def _events(self, raw: bytes) -> Iterator[Event]:
        if not raw.startswith(b"data: ") or self._over:
            return
        yield from self._begin()
        yield from self._end() if raw == b"data: [DONE]" else self._chunk(raw[6:])

    def _begin(self) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            yield "response.created", {"response": self.response.begun()}
            yield "response.in_progress", {"response": self.response.begun()}

    def _chunk(self, raw: bytes) -> Iterator[Event]:
        try:
            chunk = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return  # adds nothing
        if error := chunk.get("error"):
            yield from self._fail(error if isinstance(error, dict) else {"message": str(error)})
            return
        self.response.usage = chunk.get("usage") or self.response.usage
        for choice in chunk.get("choices", ())[:1]:
            self.response.finish = choice.get("finish_reason") or self.response.finish
            yield from self._delta(choice.get("delta") or {})

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        if text := _text(delta.get("content")):
            if not isinstance(self._open, OpenMessage):
                yield from self._close("completed")
                self._open = OpenMessage(self.response, len(self._output))
                yield from self._open.begin()
            yield self._open.more(text)
        for call in delta.get("tool_calls") or ():
            yield from self._call(call, call.get("function") or {})

    def _call(self, call: Mapping[str, Any], function: Mapping[str, Any]) -> Iterator[Event]:
        number = int(call.get("index") or 0)
        if not isinstance(self._open, OpenCall) or self._open.number != number:
            yield from self._close("completed")
            names = (str(call.get("id") or f"call_{number}"), str(function.get("name") or ""))
            self._open = OpenCall(self.response, len(self._output), number, *names)
            yield from self._open.begin()
        if arguments := _text(function.get("arguments")):
            yield self._open.more(arguments)

    def _close(self, status: str) -> Iterator[Event]:
        """Close the open item, if there is one, as complete or cut short."""
        if self._open is not None:
            yield from self._open.end(status)
            self._output.append(self._open.item(status))
            self._open = None

    def _end(self) -> Iterator[Event]:
        self._over = True
        if self._open is None and not self._output:  # an empty answer is an answer too
            self._open = OpenMessage(self.response, 0)
            yield from self._open.begin()
        yield from self._close(self.response.status)
        yield f"response.{self.response.status}", {"response": self.response.ended(self._output)}

    def _fail(self, error: Mapping[str, Any]) -> Iterator[Event]:
        self._over = True
        cut = [self._open.item("incomplete")] if self._open is not None else []
        yield "response.failed", {"response": self.response.failed([*self._output, *cut], error)}
        yield "error", {**error, "error": error}


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise TypeError("no text")


class CheckedResponse:
    """The answer of a call that responses share: it can be read, and stays as the engine said it, since each of them
    becomes a response of its own."""

    def __init__(self, translation: StreamedResponse | WholeResponse) -> None:
        self._translation = translation

    def translate(self, raw: bytes) -> bytes:
        """Raises UnreadableAnswer."""
        self._translation.translate(raw)
        return raw


def as_response(
    echo: Mapping[str, Any], request_id: str, created_at: float, *, streamed: bool
) -> StreamedResponse | WholeResponse:
    """For a request whose client speaks /v1/responses."""
    response = ResponseObject(echo, request_id, created_at)
    return StreamedResponse(response) if streamed else WholeResponse(response)


def carries_text(event: bytes) -> bool:
    """True when an event of a response delivers at least one token's text, or a piece of a call."""
    return event.startswith(DELTAS)
