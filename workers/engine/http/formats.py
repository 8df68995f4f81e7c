"""OpenAI's response shapes, bytes ready to send. A stream's fixed parts are encoded once a request."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson

from controller.core.steps import FinishReason, Seq

DONE = b"data: [DONE]\n\n"


def usage_of(seq: Seq) -> dict[str, Any]:
    return {
        "prompt_tokens": seq.prompt_tokens,
        "total_tokens": seq.tokens,
        "completion_tokens": seq.output_tokens,
        "prompt_tokens_details": {"cached_tokens": seq.cached},
    }


class Format(ABC):
    """Shared by both endpoints: a head, a choice around the text, a tail."""

    kind = ""
    chunk_kind = ""
    opening = b'"text":'
    closing = b',"logprobs":null,"finish_reason":'

    def __init__(self, name: str, model: str) -> None:
        self._head = {"id": name, "object": self.kind, "created": int(time.time()), "model": model}
        head = orjson.dumps({**self._head, "object": self.chunk_kind})[:-1]
        self._start = b"data: " + head
        self._choice = self._start + b',"choices":[{"index":0,' + self.opening

    def first(self) -> bytes:
        """What precedes the first token's event."""
        return b""

    def event(self, text: str, finish: FinishReason | None, stop_reason: str | int | None = None) -> bytes:
        if finish is None:
            return self._choice + orjson.dumps(text) + self.closing + b'null,"stop_reason":null}]}\n\n'
        tail = orjson.dumps(finish) + b',"stop_reason":' + orjson.dumps(stop_reason) + b"}]}\n\n"
        return self._choice + orjson.dumps(text) + self.closing + tail

    def usage_event(self, seq: Seq) -> bytes:
        return self._start + b',"choices":[],"usage":' + orjson.dumps(usage_of(seq)) + b"}\n\n"

    def body(
        self,
        text: str,
        seq: Seq,
        finish: FinishReason,
        stop_reason: str | int | None,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        choice = {
            "index": 0,
            **self.message(text),
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": stop_reason,
        }
        return orjson.dumps({**self._head, "choices": [choice], "usage": usage_of(seq), **extra})

    @abstractmethod
    def message(self, text: str) -> dict[str, Any]:
        """Where a choice holds its text."""


class CompletionFormat(Format):
    kind = chunk_kind = "text_completion"

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatFormat(Format):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening = b'"delta":{"content":'
    closing = b'},"logprobs":null,"finish_reason":'

    def first(self) -> bytes:
        """The role, in an event that carries no token."""
        choice = (
            b',"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
        )
        return self._start + choice + b"\n\n"

    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}
