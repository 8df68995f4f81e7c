"""The data path's HTTP client against servers that break the rules slowly, or bend them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import aiohttp
import pytest

from controller.core.types import InstanceSpec
from tests.workers.http.test_wire import CHUNKED, OK, PATIENT, Answer, Server, ask
from workers.backends.base import EngineError, Limits, UpstreamCall
from workers.backends.vllm import VllmBackend
from workers.http.wire import MOST_HEAD_BYTES, BadAnswer, Patience, TooLarge, Unanswered, Wire

STATUS = b"HTTP/1.1 200 OK\r\n"


def dribbles(pieces: Iterator[bytes], every_s: float) -> Answer:
    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every_s)

    return answer


def sends_and_closes(start: bytes) -> Answer:
    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await writer.drain()
        writer.close()

    return answer


@pytest.mark.parametrize("start", [b"H", STATUS, STATUS + b"content-len", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_kept_connection_that_dies_in_its_answer_is_not_asked_again(start: bytes) -> None:
    """The server has done the work, or a part of it: it is not to be done twice unasked."""
    async with Server(OK, sends_and_closes(start)) as server:
        client = Wire(server.url)
        await ask(client)
        with pytest.raises(ConnectionResetError) as caught:
            await ask(client)
        assert not isinstance(caught.value, Unanswered)
        assert len(server.requests) == 2


@pytest.mark.parametrize("piece", [b"x-pad: y\r\n", b"HTTP/1.1 102 Processing\r\n\r\n"])
async def test_headers_that_come_bit_by_bit_have_no_more_time_than_others(piece: bytes) -> None:
    start = STATUS if piece.startswith(b"x") else b""
    async with Server(dribbles(itertools.chain([start], itertools.repeat(piece)), 0.02)) as server:
        with pytest.raises(TimeoutError, match="no answer in time"):
            await asyncio.wait_for(ask(Wire(server.url), Patience(5.0, 0.2, 5.0, 30.0)), 10)


@pytest.mark.parametrize("piece", [b"x-%d: y\r\n", b"y", b"HTTP/1.1 102 Processing\r\nx-%d: y\r\n\r\n"])
async def test_headers_without_end_are_refused(piece: bytes) -> None:
    start = {b"x": STATUS, b"y": STATUS + b"x-long: ", b"H": b""}[piece[:1]]

    def flood() -> Iterator[bytes]:
        yield start
        for n in itertools.count():
            yield b"".join(piece.replace(b"%d", b"%d" % (n * 4096 + k)) for k in range(4096))

    async with Server(dribbles(flood(), 0.0)) as server:
        with pytest.raises(BadAnswer, match="header"):
            await asyncio.wait_for(ask(Wire(server.url)), 10)


async def test_long_headers_are_read_and_a_long_body_is_none() -> None:
    long = b"v" * (MOST_HEAD_BYTES // 2)
    body = bytes(4 * MOST_HEAD_BYTES)
    whole = STATUS + b"x-long: " + long + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with Server(whole, whole, whole) as server:
        client = Wire(server.url)
        for _ in range(3):  # one answer's headers are not the next one's
            answer = await client.post("/", b"", PATIENT)
            assert answer.headers["x-long"] == long.decode()
            assert await answer.read() == body
            answer.release()
        assert server.connections == 1


async def test_trailers_are_no_headers_of_this_answer_or_of_the_next() -> None:
    trailers = b"0\r\nX-Name: trailer\r\nX-Other: trailer\r\n\r\n"
    first = b"HTTP/1.1 200 OK\r\nX-Name: header\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n" + trailers
    async with Server(first, STATUS + b"content-length: 2\r\n\r\nho") as server:
        client = Wire(server.url)
        answer = await client.post("/", b"", PATIENT)
        assert await answer.read() == b"hi"
        assert (answer.headers["x-name"], "x-other" in answer.headers) == ("header", False)
        answer.release()
        answer = await client.post("/", b"", PATIENT)
        assert (await answer.read(), answer.headers) == (b"ho", {"content-length": "2"})
        answer.release()
        assert server.connections == 1


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_leaves_its_connection_to_the_next(status: int) -> None:
    async with Server(b"HTTP/1.1 %d None\r\n\r\n" % status, OK) as server:
        client = Wire(server.url)
        answer = await client.post("/", b"", PATIENT)
        assert (answer.status, await answer.read()) == (status, b"")
        answer.release()
        assert await ask(client) == b"hi"
        assert server.connections == 1


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 2\r\ncontent-length: 5\r\n",
        b"content-length: 2x\r\n",
        b"content-length: 99999999999999999999999\r\n",
    ],
)
async def test_two_ways_to_read_one_answer_are_none(lines: bytes) -> None:
    async with Server(STATUS + lines + b"\r\n2\r\nhi\r\n0\r\n\r\n") as server:
        with pytest.raises(BadAnswer):
            await ask(Wire(server.url))


async def test_what_comes_behind_an_answer_is_never_part_of_the_next() -> None:
    async with Server(CHUNKED + b"2\r\nhi\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n", OK) as server:
        client = Wire(server.url)
        assert [await ask(client), await ask(client)] == [b"hi", b"hi"]
        assert server.connections == 2


async def test_of_a_refusal_without_end_only_the_start_is_read() -> None:
    start = b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"4000\r\n" + bytes(0x4000) + b"\r\n"
    async with Server() as server, aiohttp.ClientSession() as session:
        backend = VllmBackend(InstanceSpec("e", "demo", url=server.url), session, Limits(control_s=30.0))
        call = UpstreamCall("r", "/v1/completions", b"{", 0, True, False)
        for asked in (anext(backend.generate(call)), backend._control("/sleep")):
            server.answers.append(dribbles(itertools.chain([start], itertools.repeat(piece)), 0.0))
            with pytest.raises(EngineError) as caught:
                await asyncio.wait_for(asked, 10)
            assert (caught.value.status, len(caught.value.body)) == (500, 64 << 10)


async def test_a_body_is_read_up_to_a_bound() -> None:
    async with Server(OK, STATUS + b"content-length: 6\r\n\r\nlonger") as server:
        client = Wire(server.url)
        answer = await client.post("/", b"", PATIENT)
        assert await answer.read(2) == b"hi"
        answer.release()
        answer = await client.post("/", b"", PATIENT)
        with pytest.raises(TooLarge, match="more than 2 bytes"):
            await answer.read(2)
        answer.close()
