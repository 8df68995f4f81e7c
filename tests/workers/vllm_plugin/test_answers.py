"""What answers say of how their KV came, as a gateway reads it: KvInAnswers around an application like vLLM's."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.kv_links import KvMoved
from workers.backends.http import EventReader, kv_moved
from workers.vllm_plugin.answers import HEADER, KvInAnswers, KvTold, Message

SECRET, OTHER = "5" * 32, "6" * 32
MOVED = KvMoved(
    4096, 8, 100, 16, 7.5, 0.25, True, held_s=6.5, promotions=1, level=2, flow="scheduled"
)  # fmt: skip
FIRST, SECOND = b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"choices":[{"text":"b"}]}\n\n'
WHOLE, STREAM = b'{"choices":[{"text":"ab"}]}', (FIRST, SECOND, b"data: [DONE]\n\n")


def body(secret: str = SECRET) -> bytes:
    return b'{"prompt":"Hello","kv_transfer_params":{"slackline_kv":"%s"},"priority":1}' % secret.encode()


def reported(*secrets: str) -> KvTold:
    told = KvTold()
    told.add({secret: MOVED._asdict() for secret in secrets or (SECRET,)})
    return told


async def answer(
    told: KvTold, *parts: bytes, events: tuple[bytes, ...] = (), path: str = "/v1/completions", status: int = 200
) -> list[Message]:
    """What is sent to a client whose body comes in these parts. `events`: of a stream."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        kind = b"text/event-stream; charset=utf-8" if events else b"application/json"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        for event in events or (WHOLE,):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    sent: list[Message] = []
    coming = [
        {"type": "http.request", "body": part, "more_body": at < len(parts)} for at, part in enumerate(parts, 1)
    ]  # fmt: skip

    async def receive() -> Message:
        return coming.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    await KvInAnswers(app, told)({"type": "http", "method": "POST", "path": path}, receive, send)
    return sent


def headers(sent: list[Message]) -> dict[bytes, bytes]:
    return dict(sent[0]["headers"])


def bytes_of(sent: list[Message]) -> bytes:
    return b"".join(message["body"] for message in sent[1:])


async def test_a_gateway_reads_it_from_the_header_of_a_whole_answer() -> None:
    sent = await answer(reported(), body())
    assert kv_moved(headers(sent)[HEADER]) == MOVED
    assert bytes_of(sent) == WHOLE


async def test_a_gateway_reads_it_from_a_stream_before_the_first_token_and_drops_it() -> None:
    sent = await answer(reported(), body(), events=STREAM)
    assert HEADER not in headers(sent), "they are sent before the KV is there"
    reader = EventReader(chat=False, keep_usage=False)
    first = reader.feed(sent[1]["body"])
    assert first is not None
    assert (first.moved, first.tokens, first.raw) == (MOVED, 1, FIRST)
    assert [message["body"] for message in sent[2:]] == [SECOND, b"data: [DONE]\n\n", b""]


async def test_it_is_told_once() -> None:
    told = reported()
    await answer(told, body())
    assert HEADER not in headers(await answer(told, body()))


async def test_a_body_may_come_in_parts() -> None:
    whole = body()
    for cut in range(1, len(whole), 7):
        sent = await answer(reported(), b" " * 70_000 + whole[:cut], whole[cut:])
        assert HEADER in headers(sent), cut


async def test_the_last_secret_counts_as_it_is_the_gateways() -> None:
    given = b'{"tools":[{"slackline_kv":"%s"}],%s' % (OTHER.encode(), body()[1:])
    told = reported(SECRET, OTHER)
    assert HEADER in headers(await answer(told, given))
    assert (told.take(SECRET), told.take(OTHER) != b"") == (b"", True)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (b'{"prompt":"Hello"}', "/v1/completions"),
        (b'{"prompt":"{\\"slackline_kv\\":\\"%s\\"}"}' % SECRET.encode(), "/v1/completions"),  # in a client's text
        (body("short"), "/v1/completions"),
        (body(OTHER), "/v1/chat/completions"),  # whose load failed
        (body(), "/v1/embeddings"),
    ],
)
async def test_other_answers_stay_as_they_are(given: bytes, path: str) -> None:
    for events in ((), STREAM):
        told = reported()
        sent = await answer(told, given, path=path, events=events)
        assert HEADER not in headers(sent)
        assert bytes_of(sent) == (b"".join(events) or WHOLE)
        assert told.take(SECRET), "it is still there"


def test_what_no_answer_takes_is_bounded_and_the_oldest_goes_first() -> None:
    told = KvTold(most=2)
    for name in "abc":
        told.add({name: MOVED._asdict()})
    assert [bool(told.take(name)) for name in "abc"] == [False, True, True]
