"""What tests of /v1/responses share: bodies, the events of a stream, a client told what an engine says."""

from __future__ import annotations

import json
from typing import Any

from api.openai.protocol.response_streams import as_response
from tests.api.openai.gateways import Answer, TestBed
from workers.backends.base import UpstreamCall

PATH = "/v1/responses"
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": "gpt", "input": "hello", **changes}


def told(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream; each names itself twice."""
    events = []
    for event in answer.body.decode().split("\n\n"):
        if event:
            name, data = event.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def upstream(bed: TestBed) -> tuple[UpstreamCall, dict[str, Any]]:
    (call,) = [call for name in ("e1", "e2") for call in bed.backend(name).calls]
    return call, json.loads(call.head + b"}")


class Heard:
    """A client of one response, told what the relay makes of the engine's messages."""

    def __init__(self, *, streamed: bool) -> None:
        self.answer = Answer()
        self.translation = as_response({"model": "m", "tools": [FUNCTION]}, "req-1", 0.0, streamed=streamed)

    def hear(self, *bodies: bytes) -> Answer:
        for body in bodies:
            self.answer.body += self.translation.translate(body)
        return self.answer


def delta(finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def piece(index: int, arguments: str, **named: Any) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments, **({"name": "f"} if named else {})}, **named}
