from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from aiohttp import web

from controller.core.types import InstanceSpec
from workers.backends.base import EngineError, Limits, UpstreamCall, Usage
from workers.backends.http import MAX_EVENT_BYTES, EventReader, parse_usage
from workers.backends.vllm import VllmBackend

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


@pytest.mark.parametrize("size", [100, 100_000])
def test_an_event_that_never_ends_is_refused(size: int) -> None:
    read = reader()
    for _ in range(MAX_EVENT_BYTES // size):
        assert read.feed(b"x" * size) is None
    with pytest.raises(EngineError, match="an event of more than"):
        read.feed(b"x" * size)


def test_an_event_in_small_pieces_costs_no_more_than_its_bytes() -> None:
    """Found by attack: each piece copied and searched all before it, 1.2 s for a MiB in pieces of 400 bytes."""
    read, piece = reader(), b"x" * 40
    began = time.process_time()
    for _ in range(MAX_EVENT_BYTES // len(piece)):
        read.feed(piece)
    assert time.process_time() - began < 1.0, "10 s before"
    chunk = read.feed(b"\n\n" + TEXT)
    assert chunk is not None
    assert chunk.tokens == 1


STREAM = (
    ROLE
    + WORD
    + WORD.replace(b"\n", b"\r\n")
    + b": ping\r\n\r\n"
    + WORD.replace(b" hi", b"a\\r\\n")
    + STOP
    + USAGE
    + DONE
)


@pytest.mark.parametrize("size", [*range(1, 9), 64, 1000])
def test_how_a_stream_is_cut_changes_nothing(size: int) -> None:
    whole, read = reader(chat=True, keep_usage=True).feed(STREAM), reader(chat=True, keep_usage=True)
    assert whole is not None
    parts = [chunk for at in range(0, len(STREAM), size) if (chunk := read.feed(STREAM[at : at + size])) is not None]
    assert b"".join(part.raw for part in parts) == whole.raw
    assert sum(part.tokens for part in parts) == whole.tokens == 3
    assert [part.usage for part in parts if part.usage] == [Usage(7, 2)]
    assert parts[-1].done


async def test_an_event_that_trickles_is_given_up_after_the_longest_silence(session: aiohttp.ClientSession) -> None:
    """A byte now and then is no silence, and would hold the request until its whole time is over."""

    async def trickle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(ROLE)
        for _ in range(1_000):
            await answer.write(b"x")
            await asyncio.sleep(0.02)
        return answer

    app = web.Application()
    app.router.add_post("/v1/chat/completions", trickle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    backend = VllmBackend(InstanceSpec("e", "demo", url=url), session, Limits(between_chunks_s=0.5))
    call = UpstreamCall("r", "/v1/chat/completions", b'{"model":"demo"', 0, streamed=True, keep_usage=False)

    async def read() -> None:
        async for _ in backend.generate(call):
            pass

    with pytest.raises(EngineError, match="an event that does not end"):
        await asyncio.wait_for(read(), 5)
    await runner.cleanup()


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"usage":null}', b'{"usage":{"prompt_tokens":"x"}}', b'{"usage":3}']
)
def test_unreadable_usage_is_none(raw: bytes) -> None:
    assert parse_usage(raw) is None


def thought(text: bytes, field: bytes = b"reasoning_content") -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"' + field + b'":"' + text + b'"},"finish_reason":null}]}\n\n'


@pytest.mark.parametrize("field", [b"reasoning_content", b"reasoning"])
def test_reasoning_is_counted_apart_from_the_answer(field: bytes) -> None:
    found = reader(chat=True)
    chunks = [found.feed(event) for event in (OPENING, thought(b"hm", field), thought(b"so", field) + WORD, WORD)]
    assert [(chunk.tokens, chunk.reasoning) for chunk in chunks if chunk] == [(0, 0), (1, 1), (2, 2), (1, 2)]


def test_a_token_without_text_belongs_to_what_came_before_it_or_follows_at_the_start() -> None:
    found = reader(chat=True)
    events = (SILENT_CHAT, thought(b"hm"), SILENT_CHAT, WORD, SILENT_CHAT, thought(b"so"))
    assert [chunk.reasoning for chunk in map(found.feed, events) if chunk] == [0, 2, 3, 3, 3, 3]
    found = reader(chat=True)
    assert [chunk.reasoning for chunk in map(found.feed, (SILENT_CHAT, WORD, thought(b"hm"))) if chunk] == [0, 0, 0]


@pytest.mark.parametrize(
    "delta", [b'"tool_calls":[{"index":0}],"reasoning":"x"', b'"content":"a","reasoning_content":"b"']
)
def test_an_event_with_both_has_begun_the_answer(delta: bytes) -> None:
    chunk = reader(chat=True).feed(b'data: {"choices":[{"delta":{' + delta + b"}}]}\n\n")
    assert chunk is not None
    assert (chunk.tokens, chunk.reasoning) == (1, 0)


def test_a_text_that_speaks_of_reasoning_is_none() -> None:
    quoted = b'data: {"choices":[{"delta":{"content":"say \\"reasoning\\":\\"x\\""}}]}\n\n'
    assert [each.reasoning for each in [reader(chat=True).feed(quoted), reader().feed(TEXT)] if each] == [0, 0]
