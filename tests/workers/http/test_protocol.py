"""The limits of every server, attacked through real sockets. `PLAIN=1` in the environment runs the same attacks on
uvicorn's own protocol, which holds none of them off."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn

from benchmarks.attacks import hostile
from tests.waiting import until_on_loop
from workers.http.limits import HttpLimits
from workers.http.protocol import CLOSED, BoundedProtocol, address_of, bounded, counted_websocket

SHORT = HttpLimits(head_s=0.5, body_s=0.5, send_s=0.5, upload_s=5.0, connections=400, connections_per_address=400)
WITHIN_S = 3.0
POST = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """Answers `ok` to whole bodies; `/flood` streams forever; `/full` until the client takes in no more; `/slow`
    answers after a while, `/early` before the body came. `unsent`: bytes that wait for clients."""

    def __init__(self, unsent: Callable[[], int]) -> None:
        self.unsent = unsent
        self.ended: list[str | None] = []
        self.headers: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            while (await receive())["type"] != "websocket.disconnect":
                continue
            return
        more = scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.ended.append(scope.get(CLOSED))
                return
            more = message.get("more_body", False)
        self.headers.append(list(scope["headers"]))
        if scope["path"] == "/slow":
            await asyncio.sleep(1.5)
        flood, full = scope["path"] == "/flood", scope["path"] == "/full"
        fields = [] if flood or full else [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        while full and not self.unsent():
            await send({"type": "http.response.body", "body": b"x" * 8192, "more_body": True})
            await asyncio.sleep(0)
        while flood:
            if scope.get(CLOSED):
                self.ended.append(scope[CLOSED])
                return
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"ok"})


class Server:
    def __init__(self, limits: HttpLimits, uploads: tuple[str, ...] = ()) -> None:
        self.app = App(self.unsent)
        self.protocol: type[BoundedProtocol] = bounded(limits, uploads)
        plain = bool(os.environ.get("PLAIN"))
        config = uvicorn.Config(
            self.app,
            port=0,
            http="httptools" if plain else self.protocol,
            ws=counted_websocket(self.protocol.book),
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        self.server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]

    @property
    def port(self) -> int:
        return int(self.server.servers[0].sockets[0].getsockname()[1])

    def unsent(self) -> int:
        return sum(each.transport.get_write_buffer_size() for each in self.server.server_state.connections)

    async def empty(self) -> None:
        """Wait until no connection is open."""
        for _ in range(200):
            if not self.protocol.book.open:
                return
            await asyncio.sleep(0.01)

    @property
    def closed(self) -> dict[str, int]:
        return dict(self.protocol.book.closed)


@contextlib.asynccontextmanager
async def serving(limits: HttpLimits = SHORT, uploads: tuple[str, ...] = ()) -> AsyncIterator[Server]:
    server = Server(limits, uploads)
    task = asyncio.create_task(server.server.serve())
    while not server.server.started:
        await asyncio.sleep(0.01)
    try:
        yield server
        book = server.protocol.book
        await server.empty()
        assert (book.open, book.by_address, book.heads_bytes, book.reading) == (0, {}, 0, {})
    finally:
        server.server.should_exit = True
        await task


async def ask(port: int, request: bytes, within_s: float = 3.0) -> bytes:
    connection = (await hostile.connect(port)).listen()
    await connection.send(request)
    await connection.over(within_s)
    connection.close()
    return connection.answer


async def test_half_open_requests_are_closed_in_time():
    async with serving() as server:
        seen = await hostile.half_open(server.port, 200, WITHIN_S)
        assert seen.held == 0
        assert seen.answer.startswith(b"HTTP/1.1 408 ")
        assert b"head_timeout" in seen.answer


async def test_a_head_that_drips_is_closed_in_time():
    async with serving() as server:
        assert (await hostile.slow_head(server.port, 50, WITHIN_S)).held == 0


async def test_connections_on_which_nothing_comes_are_closed():
    async with serving() as server:
        assert (await hostile.silent(server.port, 50, WITHIN_S)).held == 0
        assert server.closed == {"no_request": 50}


async def test_empty_lines_are_no_request():
    async with serving() as server:
        assert (await hostile.blank_lines(server.port, 20, WITHIN_S)).held == 0


async def test_empty_lines_after_an_answer_do_not_hold_a_connection():
    async with serving() as server:
        connection = (await hostile.connect(server.port)).listen()
        await connection.send(GET)
        await asyncio.sleep(0.1)
        connection.drip(b"\r\n", 0.1)
        assert await connection.over(WITHIN_S)
        connection.close()


async def test_a_large_header_is_refused_before_it_is_kept():
    async with serving() as server:
        seen = await hostile.large_header(server.port)
        assert seen.held == 0
        assert seen.sent < 16 << 20  # what sockets buffer


async def test_a_head_of_a_byte_too_much_is_refused():
    """Far below the share of an address in all unfinished heads, so that its own limit is what refuses it."""
    head = b"GET / HTTP/1.1\r\nHost: x\r\na: "
    fits = head + b"x" * (SHORT.head_bytes - len(head) - 4) + b"\r\n\r\n"
    over = fits.replace(b"a: ", b"a: x")
    async with serving() as server:
        assert len(fits) == SHORT.head_bytes
        assert (await ask(server.port, fits, 0.5)).startswith(b"HTTP/1.1 200 ")
        answer = await ask(server.port, over)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"head_too_large" in answer
        assert server.closed == {"head_too_large": 1}


async def test_many_headers_are_refused():
    async with serving() as server:
        assert (await hostile.many_headers(server.port)).held == 0
        answer = await ask(server.port, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 129 + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"too_many_headers" in answer


async def test_a_body_that_drips_is_answered_408():
    async with serving() as server:
        seen = await hostile.slow_body(server.port, 20, WITHIN_S, POST)
        assert seen.held == 0
        assert b"request_timeout" in seen.answer
        assert server.app.ended == ["request_timeout"] * 20


async def test_a_request_that_was_answered_before_its_body_came_gets_no_second_answer():
    async with serving() as server:
        answer = await ask(server.port, POST.replace(b"/x", b"/early"))
        assert (answer.count(b"HTTP/1.1 "), answer.endswith(b"ok")) == (1, True)
        assert server.closed == {"request_timeout": 1}


async def test_uploads_have_a_time_of_their_own():
    async with serving(uploads=("/x",)) as server:
        assert (await hostile.slow_body(server.port, 5, 1.5, POST)).held == 5


async def test_endless_chunk_extensions_and_trailers_are_refused():
    async with serving() as server:
        extension = await hostile.endless(server.port, CHUNKED + b"1;a=", b"x" * 4096, 8 << 20)
        trailer = await hostile.endless(server.port, CHUNKED + b"0\r\nx-a: ", b"x" * 4096, 8 << 20)
        trailers = await hostile.endless(server.port, CHUNKED + b"0\r\n", b"x-a: b\r\n" * 100, 8 << 20)
        assert (extension.held, trailer.held, trailers.held) == (0, 0, 0)
        assert server.closed == {"bad_chunks": 3}


async def test_trailers_are_not_headers_of_the_request():
    async with serving() as server:
        await ask(server.port, CHUNKED + b"1\r\nx\r\n0\r\nauthorization: Bearer other\r\n\r\n", 0.5)
        [headers] = server.app.headers
        assert b"authorization" not in dict(headers)


async def test_both_lengths_and_bad_chunks_are_refused():
    smuggled = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    bad = (
        smuggled,
        CHUNKED + b"zz\r\n",
        CHUNKED + b"ffffffffffffffffff\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02",
    )
    async with serving() as server:
        for request in bad:
            answer = await ask(server.port, request)
            assert answer.startswith(b"HTTP/1.1 400 "), request
        assert server.app.headers == []


async def test_requests_before_their_answers_are_bounded():
    async with serving() as server:
        seen = await hostile.endless(server.port, b"", GET * 2_000, 4 << 20)
        assert seen.held == 0
        assert server.closed["too_many_pipelined"] >= 1


async def test_a_few_requests_before_their_answers_are_served():
    async with serving() as server:
        connection = (await hostile.connect(server.port)).listen()
        await connection.send(GET * 20)
        await asyncio.sleep(0.5)
        assert connection.answer.count(b"HTTP/1.1 200") == 20
        connection.close()


async def test_connections_are_bounded_in_all_and_by_address():
    for limits, why in (
        (HttpLimits(connections=20), "too_many_connections"),
        (HttpLimits(connections_per_address=20), "too_many_from_address"),
    ):
        async with serving(limits) as server:
            seen = await hostile.half_open(server.port, 50, 0.5)
            assert seen.held == 20
            assert server.closed == {why: 30}
            await server.empty()
            assert (await ask(server.port, GET, 0.5)).startswith(b"HTTP/1.1 200")


async def idle(port: int, count: int, address: str) -> list[asyncio.StreamWriter]:
    """Connections of this address that were answered once and stay."""
    kept = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        writer.write(GET)
        await reader.readuntil(b"ok")
        kept.append(writer)
    return kept


async def test_idle_connections_make_room_for_others():
    """Two addresses that keep to every limit hold all places."""
    async with serving(HttpLimits(connections=40, connections_per_address=25)) as server:
        kept = [*await idle(server.port, 25, "127.0.0.2"), *await idle(server.port, 15, "127.0.0.3")]
        for _ in range(5):
            assert (await ask(server.port, GET, 0.5)).startswith(b"HTTP/1.1 200")
        kept += await idle(server.port, 3, "127.0.0.4")
        open_now = server.protocol.book.by_address
        assert open_now["127.0.0.2"] < 25  # whoever keeps most of them gives them up
        assert (open_now["127.0.0.3"], open_now["127.0.0.4"]) == (15, 3)
        assert set(server.closed) == {"made_room"}
        for writer in kept:
            writer.close()


async def test_an_address_makes_room_for_itself():
    async with serving(HttpLimits(connections_per_address=20)) as server:
        kept = await idle(server.port, 30, "127.0.0.2")
        assert server.closed == {"made_room": 10}
        assert len(server.protocol.book.idle["127.0.0.2"]) == 20
        for writer in kept:
            writer.close()
        await server.empty()
        assert server.protocol.book.idle == {}


async def test_requests_under_way_are_not_closed_for_others():
    async with serving(HttpLimits(connections=3)) as server:
        slow = [asyncio.create_task(ask(server.port, b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert (await ask(server.port, GET, 0.5)).startswith(b"HTTP/1.1 503")
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in await asyncio.gather(*slow))


async def test_a_websocket_keeps_the_place_of_its_connection():
    upgrade = (
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with serving(HttpLimits(connections_per_address=3)) as server:
        sockets = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(upgrade)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            sockets.append(writer)
        assert server.protocol.book.open == 3
        assert (await ask(server.port, GET, 0.5)).startswith(b"HTTP/1.1 503 ")
        for writer in sockets:
            writer.close()
        await server.empty()
        assert (await ask(server.port, GET, 0.5)).startswith(b"HTTP/1.1 200 ")


async def test_all_unfinished_heads_of_an_address_are_bounded():
    async with serving(HttpLimits(heads_bytes=8 << 20)) as server:
        seen = await hostile.half_open(server.port, 60, 0.5, b"GET / HTTP/1.1\r\na: " + b"x" * 60_000)
        assert 16 <= seen.held <= 18
        assert server.closed["too_many_heads"] >= 40
        assert server.protocol.book.heads_bytes <= 1 << 20


async def part_of_a_head(port: int, address: str, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"x" * size)
    await writer.drain()
    return reader, writer


async def test_all_unfinished_heads_together_are_bounded_at_the_cost_of_who_holds_most():
    limits = HttpLimits(heads_bytes=1 << 20)
    async with serving(limits) as server:
        hogs = [await part_of_a_head(server.port, f"127.0.1.{number + 1}", 60_000) for number in range(18)]
        hogs += [await part_of_a_head(server.port, f"127.0.1.{number + 1}", 50_000) for number in range(10)]
        reader, writer = await part_of_a_head(server.port, "127.0.0.1", 6_000)
        await asyncio.sleep(0.2)
        assert server.protocol.book.heads_bytes <= limits.heads_bytes
        writer.write(b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        assert server.closed["too_many_heads"] >= 8
        for _, other in [*hogs, (reader, writer)]:
            other.close()
        await server.empty()
        assert (server.protocol.book.heads_bytes, server.protocol.book.heads) == (0, {})


async def test_a_client_that_never_reads_is_hung_up_on_and_its_writer_goes_on():
    async with serving() as server:
        request = b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n"
        assert (await hostile.never_read(server.port, 5, WITHIN_S, request)).held == 0
        assert server.app.ended == ["client_stalled"] * 5


async def test_a_client_that_does_not_read_the_end_of_an_answer_is_hung_up_on():
    """So little waits for it that no writer is stopped, and the connection would close once the client has read it."""
    async with serving() as server:
        connection = await hostile.connect(server.port, receive_buffer=2_048)
        connection.reader._transport.pause_reading()
        await connection.send(b"GET /full HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await until_on_loop(lambda: server.app.headers)
        await server.empty()
        assert server.protocol.book.open == 0
        connection.close()


async def test_a_client_that_reads_slowly_but_reads_is_served():
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(20):
            await reader.readexactly(60_000)
            await asyncio.sleep(0.1)
        assert server.closed == {}
        writer.close()


async def test_an_answer_that_takes_long_is_no_reason_to_close():
    async with serving() as server:
        answer = await ask(server.port, b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")


async def test_keep_alive_goes_on_after_a_pause():
    async with serving() as server:
        connection = (await hostile.connect(server.port)).listen()
        for turn in range(1, 4):
            await connection.send(GET)
            await asyncio.sleep(0.8)  # longer than the time for a head
            assert connection.answer.count(b"HTTP/1.1 200") == turn
        connection.close()


def test_addresses():
    assert address_of(("10.0.0.1", 5)) == address_of(("::ffff:10.0.0.1", 5)) == "10.0.0.1"
    assert address_of(("2001:db8::1", 5)) == address_of(("2001:db8::ffff:1", 5)) != address_of(("2001:db8:0:1::1", 5))
    assert address_of(None) == ""
