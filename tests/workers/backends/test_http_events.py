from __future__ import annotations

import pytest

from workers.backends.base import EngineError, Usage
from workers.backends.http import EventReader, parse_usage

TEXT = b'data: {"id":"x","choices":[{"index":0,"text":" hi","finish_reason":null}]}\n\n'
EMPTY = b'data: {"id":"x","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"index":0,"delta":{"content":" hi"}}]}\n\n'
SILENT = b'data: {"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
SILENT_CHAT = b'data: {"choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":null}]}\n\n'
OPENING = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def reader(chat: bool = False, keep_usage: bool = False) -> EventReader:
    return EventReader(chat=chat, keep_usage=keep_usage)


def test_events_with_text_are_tokens() -> None:
    chunk = reader().feed(TEXT + TEXT + EMPTY)
    assert chunk is not None
    assert (chunk.tokens, chunk.raw, chunk.done) == (2, TEXT + TEXT + EMPTY, False)


def test_role_and_stop_events_of_a_chat_are_no_tokens() -> None:
    assert [reader(chat=True).feed(event).tokens for event in (ROLE, WORD, STOP)] == [0, 1, 0]


def test_a_token_without_text_is_one_and_reaches_the_client() -> None:
    # Half a character, or one that the tokenizer skips: held back, a whole answer of such came in one piece at its end.
    chunk = reader().feed(SILENT + SILENT + EMPTY)
    assert chunk is not None
    assert (chunk.tokens, chunk.raw) == (2, SILENT + SILENT + EMPTY)
    assert [reader(chat=True).feed(event).tokens for event in (OPENING, SILENT_CHAT)] == [0, 1]


@pytest.mark.parametrize("delta", [b'"reasoning_content":"hm"', b'"tool_calls":[{"index":0}]', b'"content": "x"'])
def test_reasoning_and_tool_calls_count_too(delta: bytes) -> None:
    chunk = reader(chat=True).feed(b'data: {"choices":[{"delta":{' + delta + b"}}]}\n\n")
    assert chunk is not None
    assert chunk.tokens == 1


def test_generated_text_that_looks_like_json_is_still_a_token() -> None:
    event = b'data: {"choices":[{"text":" say \\"text\\":\\"\\" and \\"choices\\":[] \\"usage\\""}]}\n\n'
    chunk = reader().feed(event)
    assert chunk is not None
    assert (chunk.tokens, chunk.raw) == (1, event)


def test_usage_is_read_and_dropped_unless_wanted() -> None:
    dropped, kept = reader().feed(USAGE + DONE), reader(keep_usage=True).feed(USAGE + DONE)
    assert dropped is not None
    assert kept is not None
    assert (dropped.raw, kept.raw) == (DONE, USAGE + DONE)
    assert dropped.usage == kept.usage == Usage(7, 2)
    assert (dropped.done, kept.done) == (True, True)


def test_events_may_arrive_in_any_pieces() -> None:
    whole = TEXT + EMPTY + USAGE + DONE
    for size in (1, 7, 50):
        read, out, tokens = reader(), b"", 0
        for start in range(0, len(whole), size):
            chunk = read.feed(whole[start : start + size])
            if chunk is not None:
                out += chunk.raw
                tokens += chunk.tokens
        assert (out, tokens) == (TEXT + EMPTY + DONE, 1)


def test_carriage_returns_are_events_too() -> None:
    chunk = reader().feed(TEXT.replace(b"\n", b"\r\n"))
    assert chunk is not None
    assert chunk.tokens == 1


def test_an_error_inside_the_stream_is_an_engine_error() -> None:
    with pytest.raises(EngineError) as caught:
        reader().feed(b'data: {"error":{"message":"boom","code":500}}\n\n')
    assert caught.value.status == 500
    assert b"boom" in caught.value.body


@pytest.mark.parametrize(
    "ended",
    [
        b'data: {"id":"x","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"abort"}]}\n\n',
        b'data: {"choices": [{"delta": {"content": ""}, "finish_reason": "abort"}]}\n\n',
    ],
)
def test_an_answer_that_the_engine_gave_up_is_an_engine_error(ended: bytes) -> None:
    with pytest.raises(EngineError, match="aborted") as caught:
        reader(chat=b"delta" in ended).feed(ended + USAGE + DONE)
    assert (caught.value.status, caught.value.client_fault) == (500, False)


def test_an_answer_that_speaks_of_aborts_is_none() -> None:
    word = b'data: {"choices":[{"index":0,"text":"abort","finish_reason":null}]}\n\n'
    quoted = b'data: {"choices":[{"index":0,"text":"\\"finish_reason\\":\\"abort\\"","finish_reason":"stop"}]}\n\n'
    chunk = reader().feed(word + quoted + DONE)
    assert chunk is not None
    assert (chunk.tokens, chunk.done) == (2, True)


def test_an_event_that_never_ends_is_refused() -> None:
    read = reader()
    for _ in range(41):
        assert read.feed(b"x" * 100_000) is None
    with pytest.raises(EngineError):
        read.feed(b"x" * 100_000)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"usage":null}', b'{"usage":{"prompt_tokens":"x"}}', b'{"usage":3}']
)
def test_unreadable_usage_is_none(raw: bytes) -> None:
    assert parse_usage(raw) is None
