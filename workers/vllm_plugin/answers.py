"""Tells a gateway with each answer how its KV came, as reference engines do: `x-slackline-kv`, or `: kv` in a stream.

The connector's worker measures a load and reports it with its figures, which vLLM brings to the process that serves
HTTP before the step that computes the request's first token. There `workers/vllm_connector/stats.py` leaves it in
`TOLD`, and `KvInAnswers`, in the middleware `workers.vllm_plugin.announce.Announce`, takes it. Both know the load by
the secret of its offer, which the request's body has. Knows nothing of vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from workers.small_json import dumps

MOVED = "moved"  # in the connector's figures: KvMoved of each load that arrived or failed, by secret
MOST_TOLD = 1024  # that no answer has taken yet: without the middleware none does
HEADER, COMMENT = b"x-slackline-kv", b": kv "  # as gateways read them
# As the connector's `PromptOffer` has it. Within a JSON string its quotes would be escaped, so no prompt has one.
_SECRET = re.compile(rb'"slackline_kv"\s*:\s*"([0-9a-f]{32})"')
_LONGEST = 128  # bytes that a match may have when a body comes in parts

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]


class KvTold:
    """Loads whose answers are not written yet, by secret. The oldest go first when there are too many."""

    def __init__(self, most: int = MOST_TOLD) -> None:
        self._most = most
        self._moved: dict[str, Mapping[str, Any]] = {}

    def add(self, moved: Mapping[str, Mapping[str, Any]]) -> None:
        self._moved.update(moved)
        while len(self._moved) > self._most:
            del self._moved[next(iter(self._moved))]

    def take(self, secret: str) -> bytes:
        """As JSON, once; empty for a load that nobody reported."""
        moved = self._moved.pop(secret, None)
        return b"" if moved is None else dumps(moved)


TOLD = KvTold()  # of this process: vLLM's metrics and its HTTP server share nothing else


class KvInAnswers:
    """An ASGI application around vLLM's own."""

    def __init__(self, app: App, told: KvTold = TOLD) -> None:
        self._app, self._told = app, told

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith("/completions"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(self._told, receive, send)
        await self._app(scope, answer.receive, answer.send)


class _Answer:
    """One request: looks for a secret in its body, and adds to its answer."""

    def __init__(self, told: KvTold, receive: Receive, send: Send) -> None:
        self._told, self._receive, self._send = told, receive, send
        self._secret = ""
        self._read = b""  # the end of the body so far
        self._streams = False

    async def receive(self) -> Message:
        message = await self._receive()
        if body := message.get("body"):
            self._read += body
            for found in _SECRET.finditer(self._read):
                self._secret = found[1].decode()  # the last one: gateways put theirs behind what clients sent
            self._read = self._read[-_LONGEST:]
        return message

    async def send(self, message: Message) -> None:
        if self._secret and message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            self._streams = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
            if not self._streams and (moved := self._told.take(self._secret)):
                message = {**message, "headers": [*headers, (HEADER, moved)]}
        elif self._streams and message.get("body"):
            self._streams = False  # it begins with the first token, and that with the KV
            if moved := self._told.take(self._secret):
                message = {**message, "body": COMMENT + moved + b"\n\n" + message["body"]}
        await self._send(message)
