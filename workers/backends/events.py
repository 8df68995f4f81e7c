"""Server-sent events of an OpenAI-style stream, counted without parsing JSON.

An event counts as a token when it carries text, and also when it carries none but the answer goes on: tokens that are
part of a character, or that the tokenizer skips, have no text yet and were computed all the same (vLLM sends an event
for each). A chat's opening event, which names the role, is none. Quotes inside a JSON string are always escaped, so the
byte patterns below cannot occur within generated text. Only the usage event (empty `choices`) and errors are parsed.
"""

from __future__ import annotations

import orjson

from controller.core.kv_links import KvMoved
from workers.backends.base import AnswerChunk, EngineError, Usage
from workers.backends.disaggregation import kv_moved

MAX_EVENT_BYTES = 4 << 20  # an engine that never ends an event must not fill our memory
DONE = b"data: [DONE]"
ERROR_HEADS = (b'data: {"error"', b'data: {"object":"error"', b'data: {"object": "error"')
KV_BEGAN = b": kv-began"  # the reference engine's: the KV of this answer begins to come
KV_COMMENT = b": kv "  # the reference engine's: how the KV of this answer came
EMPTY_CHOICES = (b'"choices":[]', b'"choices": []')
ABORTED = (b'"finish_reason":"abort"', b'"finish_reason": "abort"')


def delivers_token(event: bytes, chat: bool) -> bool:
    """True when the event delivers at least one token (of text, reasoning or a tool call, or without any text yet)."""
    if not chat:
        if b'"text":""' not in event and b'"text": ""' not in event:
            return b'"text"' in event
        return _goes_on(event)
    if b'"content":"' in event or b'"content": "' in event:
        if b'"content":""' not in event and b'"content": ""' not in event:
            return True
        if b'"role":"' not in event and b'"role": "' not in event and _goes_on(event):
            return True
    return b'"reasoning_content":"' in event or b'"reasoning":"' in event or b'"tool_calls":[{' in event


def _goes_on(event: bytes) -> bool:
    return b'"finish_reason":null' in event or b'"finish_reason": null' in event


def check_whole(raw: bytes) -> None:
    """Raises EngineError of an answer, or events of one, that the engine gave up: it says so under HTTP 200."""
    if b'"abort"' in raw and any(mark in raw for mark in ABORTED):  # one look at each chunk of a stream that goes on
        raise EngineError("the engine aborted the request", status=500)


def parse_usage(raw: bytes) -> Usage | None:
    """The `usage` object of a JSON answer or usage event; None when there is none."""
    try:
        usage = orjson.loads(raw).get("usage")
        return Usage(int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0)) if usage else None
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
        return None


class EventReader:
    """Cuts a byte stream into whole events and says what is in them. One object a stream."""

    __slots__ = ("_chat", "_keep_usage", "_rest")

    def __init__(self, *, chat: bool, keep_usage: bool) -> None:
        self._chat = chat
        self._keep_usage = keep_usage
        self._rest = b""

    def feed(self, data: bytes) -> AnswerChunk | None:
        """The whole events received so far as one chunk; None when none is complete yet."""
        data = self._rest + data if self._rest else data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            self._hold(data)
            return None
        self._rest = data[end:]
        whole = data[:end]
        check_whole(whole)
        return self._read(whole, whole[:-2].split(b"\n\n"))

    def _hold(self, data: bytes) -> None:
        if len(data) > MAX_EVENT_BYTES:
            raise EngineError(f"the engine sent an event of more than {MAX_EVENT_BYTES} bytes")
        self._rest = data

    def _read(self, whole: bytes, events: list[bytes]) -> AnswerChunk:
        tokens, usage, done, dropped, pulling = 0, None, False, False, False
        moved: KvMoved | None = None
        kept: list[bytes] = []
        for event in events:
            if event.startswith(DONE):
                done = True
            elif event.startswith(ERROR_HEADS):
                raise EngineError("the engine reported an error inside the stream", status=500, body=event[6:])
            elif any(empty in event for empty in EMPTY_CHOICES) and b'"usage"' in event:
                usage = parse_usage(event[6:]) or usage
                if not self._keep_usage:
                    dropped = True
                    continue
            elif event == KV_BEGAN:
                pulling = dropped = True
                continue
            elif event.startswith(KV_COMMENT):
                moved, dropped = kv_moved(event.removeprefix(KV_COMMENT)), True
                continue
            elif delivers_token(event, self._chat):
                tokens += 1
            kept.append(event)
        raw = b"\n\n".join([*kept, b""]) if dropped else whole
        return AnswerChunk("data", raw, tokens, usage, done, moved, pulling=pulling)
