"""The data path's HTTP client against servers that say exactly what a test wants, well and badly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from tests.waiting import until_on_loop
from workers.http import wire
from workers.http.wire import BadAnswer, Connection, NotConnected, Patience, Unanswered, Wire

PATIENT = Patience(5.0, 5.0, 5.0, 30.0)
OK = b"HTTP/1.1 200 OK\r\nX-Name: Value\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Answer = Callable[["Server", asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


class Server:
    """Reads a whole request, keeps it, and lets `answers` say what comes back, one after the other."""

    def __init__(self, *answers: bytes | Answer) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.url = ""

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for writer in self.writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int([*head.lower().split(b"content-length: "), b"0"][1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(self, reader, writer)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def close(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def ask(client: Wire, patience: Patience = PATIENT) -> bytes:
    answer = await client.post("/v1/x", b"{}", patience)
    try:
        return await answer.read()
    finally:
        answer.release()


async def test_what_is_sent_and_what_comes_back() -> None:
    async with Server(OK) as server:
        client = Wire(server.url + "/base/")
        answer = await client.post("/v1/x", b'{"a":1}', PATIENT)
        assert (answer.status, answer.headers["x-name"]) == (200, "Value")
        assert await answer.read() == b"hi"
        assert answer.at_eof()
        answer.release()
        (sent,) = server.requests
        assert sent.startswith(b"POST /base/v1/x HTTP/1.1\r\nHost: " + server.url[7:].encode() + b"\r\n")
        assert b"\r\nContent-Length: 7\r\n" in sent
        assert sent.endswith(b'\r\n\r\n{"a":1}')


async def test_a_get_has_no_body_and_its_connection_serves_a_post() -> None:
    async with Server(OK, OK) as server:
        client = Wire(server.url)
        answer = await client.call("GET", "/health?deep=1", b"", PATIENT, headers={"X-More": "1"})
        assert await answer.read() == b"hi"
        answer.release()
        assert await ask(client) == b"hi"
        assert server.connections == 1
        head, *fields = server.requests[0].rstrip(b"\r\n").split(b"\r\n")
        assert head == b"GET /health?deep=1 HTTP/1.1"
        assert {field.split(b": ")[0] for field in fields} == {
            b"Host", b"Accept", b"Accept-Encoding", b"User-Agent", b"X-More",
        }  # fmt: skip
        assert b"\r\nContent-Type: application/json\r\nContent-Length: 2\r\n" in server.requests[1]


async def test_it_says_whether_a_connection_is_kept() -> None:
    async with Server(OK, close) as server:
        client = Wire(server.url)
        assert not client.keeps
        await ask(client)
        assert client.keeps
        server.writers[0].close()
        await until_on_loop(lambda: not client.keeps)


async def test_a_connection_that_is_not_made_in_time_is_told_from_an_answer_that_does_not_come() -> None:
    async def never(host: str, port: int) -> list[tuple[int, str]]:
        await asyncio.sleep(60)
        return []

    with pytest.raises(NotConnected):
        await ask(Wire("http://no-such-host.invalid:80", never), PATIENT._replace(connect_s=0.05))


async def test_a_user_in_the_url_is_sent_as_basic_authorization() -> None:
    async with Server(OK) as server:
        await ask(Wire(server.url.replace("//", "//me:secret@")))
        assert b"\r\nAuthorization: Basic bWU6c2VjcmV0\r\n" in server.requests[0]


async def test_one_connection_serves_one_answer_after_the_other_and_two_at_once() -> None:
    async with Server(OK, CHUNKED + b"2\r\nhi\r\n0\r\n\r\n", OK, OK) as server:
        client = Wire(server.url)
        assert [await ask(client), await ask(client)] == [b"hi", b"hi"]
        assert server.connections == 1
        await asyncio.gather(ask(client), ask(client))
        assert server.connections == 2


async def test_pieces_come_as_they_are_sent() -> None:
    async def pieces(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"1\r\na\r\n")
        await asyncio.sleep(0.02)
        writer.write(b"1\r\nb\r\n0\r\n\r\n")

    async with Server(pieces) as server:
        answer = await Wire(server.url).post("/", b"", PATIENT)
        assert [await answer.readany(), await answer.readany(), await answer.readany()] == [b"a", b"b", b""]
        answer.release()


async def test_an_answer_that_we_gave_up_is_not_whole_because_it_would_end_with_its_connection() -> None:
    async def stalls(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await reader.read()

    async with Server(stalls) as server:
        answer = await Wire(server.url).post("/", b"", PATIENT._replace(between_s=0.05))
        await until_on_loop(lambda: not answer.open)  # meanwhile its reader is busy with a slow client
        assert await answer.readany() == b"half"
        with pytest.raises(TimeoutError):
            await answer.readany()
        answer.release()


async def test_a_kept_connection_that_was_closed_meanwhile_is_not_taken() -> None:
    async with Server(OK, OK) as server:
        client = Wire(server.url)
        await ask(client)
        server.writers[0].close()
        await until_on_loop(lambda: not client._idle[0].open)
        assert await ask(client) == b"hi"
        assert server.connections == 2


async def test_a_kept_connection_that_dies_as_it_is_asked_may_be_asked_again_and_a_new_one_not() -> None:
    async with Server(OK, close, OK, close) as server:
        client = Wire(server.url)
        await ask(client)
        with pytest.raises(Unanswered):
            await client.post("/", b"", PATIENT)
        answer = await client.post("/", b"", PATIENT, fresh=True)
        assert await answer.read() == b"hi"
        answer.close()
        with pytest.raises(ConnectionResetError) as caught:
            await client.post("/", b"", PATIENT)
        assert not isinstance(caught.value, Unanswered)


async def test_idle_connections_are_closed_before_their_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "KEEP_S", 0.05)
    async with Server(OK, OK) as server:
        client = Wire(server.url)
        await ask(client)
        assert len(client._idle) == 1
        await until_on_loop(lambda: not client._idle)
        assert await ask(client) == b"hi"
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi", b"hi"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"hi"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    ],
)
async def test_ways_to_frame_an_answer(answer: bytes, body: bytes) -> None:
    async with Server(answer, OK) as server:
        client = Wire(server.url)
        assert await ask(client) == body
        assert await ask(client) == b"hi"
        assert server.connections == (2 if b"close" in answer or b"1.0" in answer else 1)


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def until_closed(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhi")
        writer.close()

    async with Server(until_closed) as server:
        assert await ask(Wire(server.url)) == b"hi"


@pytest.mark.parametrize("start", [CHUNKED + b"2\r\nhi\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi"])
async def test_a_body_that_is_cut_is_an_error_after_what_came(start: bytes) -> None:
    async def cut(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        writer.close()

    async with Server(cut) as server:
        answer = await Wire(server.url).post("/", b"", PATIENT)
        assert await answer.readany() == b"hi"
        with pytest.raises(ConnectionResetError):
            await answer.readany()
        answer.release()


async def test_what_is_no_http_is_said_to_be_none() -> None:
    async with Server(b"220 mail.example ESMTP\r\n") as server:
        with pytest.raises(BadAnswer):
            await ask(Wire(server.url))


async def test_an_answer_no_one_asked_for_is_dropped_with_its_connection() -> None:
    async with Server(OK + OK.replace(b"hi", b"ho"), OK) as server:
        client = Wire(server.url)
        assert await ask(client) == b"hi"
        assert await ask(client) == b"hi"
        assert server.connections == 2


@pytest.mark.parametrize(
    ("start", "patience"),
    [
        (b"", Patience(5.0, 0.05, 5.0, 30.0)),
        (b"", Patience(5.0, 5.0, 5.0, 0.05)),
        (CHUNKED, Patience(5.0, 5.0, 0.05, 30.0)),
        (CHUNKED, Patience(5.0, 5.0, 5.0, 0.05)),
    ],
)
async def test_patience_ends(start: bytes, patience: Patience) -> None:
    async def silent(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(start)

    async with Server(silent) as server:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(Wire(server.url), patience), 10)


async def test_a_slow_reader_holds_the_server_back_and_is_not_taken_for_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, looks = 8 << 20, 0
    watch = Connection._watch

    def counted(connection: Connection) -> None:
        nonlocal looks
        looks += connection._paused
        watch(connection)

    monkeypatch.setattr(Connection, "_watch", counted)

    async def flood(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))

    async with Server(flood) as server:
        answer = await Wire(server.url).post("/", b"", Patience(5.0, 5.0, 0.1, 60.0))
        await until_on_loop(lambda: looks == 3)  # two of them a whole patience after the reader stopped
        assert len(await answer.readany()) < size
        assert len(await answer.read()) > 0
        assert answer.at_eof()
        answer.release()


async def test_no_one_there_is_a_refused_connection() -> None:
    for url in ("http://127.0.0.1:1", "http://no-such-host.invalid:80"):
        with pytest.raises(ConnectionError):
            await ask(Wire(url))


async def test_closing_ends_the_call_at_the_server() -> None:
    gone: list[bytes] = []

    async def hang(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        try:
            gone.append(await reader.read())
        except ConnectionError:
            gone.append(b"")

    async with Server(hang) as server:
        answer = await Wire(server.url).post("/", b"", PATIENT)
        waiting = asyncio.ensure_future(answer.readany())
        await asyncio.sleep(0)
        answer.close()
        with pytest.raises(ConnectionAbortedError):
            await waiting
        await until_on_loop(lambda: gone != [])
