"""The data path's HTTP client: one request at a time on each kept-alive connection, parsed by llhttp (as uvicorn does).

A general client costs the gateway more than anything else it does for a request: sessions, cookies, redirects,
multidicts, a task for each body. Between a gateway and its engines none of that is needed: no redirects, no proxies, no
compression. The same holds for a job's looks at hundreds of engines a second (`kept_calls`). Telemetry and commands,
which no request waits for, go through aiohttp.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import httptools
from yarl import URL

from workers.http.outbound import resolve

Resolve = Callable[[str, int], Awaitable[list[tuple[int, str]]]]  # of host and port: as `outbound.resolve`

NONE: Mapping[str, str] = {}
KEEP_S = 3.0  # servers close idle connections after 5 s: close first, so that none dies as it is used again
BUFFERED = 256 << 10  # unread bytes before the server has to wait
MOST_BODY_BYTES = 64 << 20  # of a whole answer; a streamed one is passed on as it comes
LARGE_BODY_BYTES = 64 << 10  # from which a copy costs more than a second buffer for the kernel
MOST_HEAD_BYTES = 64 << 10  # of status line and headers, interim answers included


class BadAnswer(OSError):
    """The server sent something that is not HTTP."""


class TooLarge(BadAnswer):
    """The answer has more bytes than its reader takes."""


class NotConnected(TimeoutError):
    """No connection was made in time, so nothing was sent."""


class Unanswered(ConnectionResetError):
    """A kept connection was closed before a byte of the answer came: the request may be sent again on a new one."""


class Patience(NamedTuple):
    """Limits in seconds: connecting, until the headers have come, between two pieces of the answer, and in all."""

    connect_s: float
    headers_s: float
    between_s: float
    total_s: float


class Wire:
    """Connections to one server. `base`: its URL, which may have a path and a user."""

    def __init__(self, base: str, resolve: Resolve = resolve) -> None:
        self._url = URL(base)
        self._prefix = self._url.raw_path.rstrip("/")
        self._fields = _fields(self._url)
        self._resolve = resolve
        self._tls = _tls() if self._url.scheme == "https" else None
        self._idle: deque[Connection] = deque()  # longest idle first
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def keeps(self) -> bool:
        """Whether a connection is open that no request uses."""
        return any(connection.open for connection in self._idle)

    def post(
        self, path: str, body: bytes, patience: Patience, *, fresh: bool = False, headers: Mapping[str, str] = NONE
    ) -> Coroutine[Any, Any, Connection]:
        return self.call("POST", path, body, patience, fresh=fresh, headers=headers)

    async def call(
        self,
        method: str,
        path: str,
        body: bytes,
        patience: Patience,
        *,
        fresh: bool = False,
        headers: Mapping[str, str] = NONE,
    ) -> Connection:
        """The answer, once its headers have come; it must be closed or released. `path`: with its query. `body`: JSON,
        or b"". `fresh`: on a new connection.

        Raises Unanswered, BadAnswer, NotConnected, TimeoutError or another OSError.
        """
        connection = self._take() if not fresh else None
        if connection is None:
            connection = await self._connect(patience.connect_s)
        try:
            more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            kind = "Content-Type: application/json\r\n" if body else ""
            size = f"{kind}Content-Length: {len(body)}\r\n" if body or method != "GET" else ""
            head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fields}{more}{size}\r\n"
            await connection.ask(head.encode(), body, patience)
        except BaseException:
            connection.close()
            raise
        return connection

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self, connect_s: float) -> Connection:
        host, port = self._url.host, self._url.port
        assert host is not None  # checked where addresses are read
        assert port is not None
        name = host if self._tls else None
        try:
            async with asyncio.timeout(connect_s):
                return await self._reach(await self._resolve(host, port), port, name)
        except TimeoutError as error:
            raise NotConnected("not connected in time") from error
        except OSError as error:  # also of names, routes and certificates: for us nothing listens there
            raise ConnectionRefusedError(str(error)) from error

    async def _reach(self, addresses: Sequence[tuple[int, str]], port: int, name: str | None) -> Connection:
        """The first address that answers. `name`: of its certificate."""
        loop = asyncio.get_running_loop()
        failed: OSError | None = None
        for family, address in addresses:
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(self), address, port, family=family, ssl=self._tls, server_hostname=name
                )
            except OSError as error:
                failed = error
            else:
                return connection
        raise failed or ConnectionRefusedError("no address")

    def keep(self, connection: Connection) -> None:
        """The connection is free for another request."""
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEEP_S, self._close_stale)

    def _close_stale(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0].heard_at + KEEP_S <= loop.time():
            self._idle.popleft().close()
        if self._idle:
            self._sweep = loop.call_at(self._idle[0].heard_at + KEEP_S, self._close_stale)


@cache
def _tls() -> ssl.SSLContext:
    """One for all servers, since each reads all certificates of the system."""
    return ssl.create_default_context()


def _fields(url: URL) -> str:
    lines = [
        f"Host: {url.host_port_subcomponent}",
        "Accept: */*",
        "Accept-Encoding: identity",
        "User-Agent: slackline",
    ]
    if url.user is not None:
        known = base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
        lines.append(f"Authorization: Basic {known}")
    return "".join(f"{line}\r\n" for line in lines)


class Connection(asyncio.Protocol):
    """A connection, and the answer that comes on it. `headers` have lower-case names; of a repeated one the last."""

    def __init__(self, wire: Wire) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.open = True
        self.heard_at = 0.0  # loop time
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._paused = False
        self._headed = False
        self._head_size = 0  # bytes until `_headed`
        self._complete = True  # no request was sent yet
        self._keep = False
        self._used = False
        self._error: OSError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._patience = Patience(0.0, 0.0, 0.0, 0.0)
        self._asked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # ---- the caller's side -----------------------------------------------------------------------------------------

    async def ask(self, head: bytes, body: bytes, patience: Patience) -> None:
        """Send the request, and wait for the headers. A large body is not copied, since many may wait for engines."""
        if self._transport is None or not self.open:
            raise Unanswered("the connection was closed")
        self.status, self.headers, self._headed, self._head_size, self._complete = 0, {}, False, 0, False
        self._patience = patience
        self._asked_at = self.heard_at = self._loop.time()
        if len(body) < LARGE_BODY_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        self._watch()
        while not self._headed and self._error is None:
            await self._news()
        if not self._headed:
            raise cast(OSError, self._error)

    async def readany(self) -> bytes:
        """What has come of the body, at least one byte; b"" at its end. Raises OSError if it was cut."""
        while not self._parts and not self._complete and self._error is None:
            await self._news()
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._size = 0
            if self._paused:
                self._pause(False)
            return data
        if not self._complete:
            raise cast(OSError, self._error)
        return b""

    async def read(self, most: int | None = None) -> bytes:
        """The whole body, or the rest of it. Raises TooLarge beyond `most` bytes; None: MOST_BODY_BYTES."""
        parts = []
        size = 0
        most = MOST_BODY_BYTES if most is None else most
        while part := await self.readany():
            size += len(part)
            if size > most:
                raise TooLarge(f"an answer of more than {most} bytes")
            parts.append(part)
        return b"".join(parts)

    def at_eof(self) -> bool:
        return self._complete and not self._parts

    def release(self) -> None:
        """Keep the connection for another request if the answer was read to its end; else close it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.open and self._keep and self.at_eof():
            self._used = True
            self._wire.keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection, which aborts whatever is under way at the server."""
        self._lost(ConnectionAbortedError("closed by us"))
        if self._transport is not None:
            self._transport.abort()

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ---- the server's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        if self._complete:  # an answer without a request
            self.close()
            return
        if not self._headed:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lost(BadAnswer(f"no HTTP: {error}"))
            self.close()
        if not self._headed and self._head_size > MOST_HEAD_BYTES:
            self._lost(BadAnswer(f"headers of more than {MOST_HEAD_BYTES} bytes"))
            self.close()
        self._wake()

    def on_message_begin(self) -> None:
        if self._complete:
            raise BadAnswer("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:  # later ones are trailers
            self.headers[name.lower().decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._headed = self.status >= 200

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)
        if self._size > BUFFERED and not self._paused:
            self._pause(True)

    def on_message_complete(self) -> None:
        if self._headed:
            self._complete, self._keep = True, self._parser.should_keep_alive()
        else:  # 1xx: the answer follows
            self.headers = {}

    def connection_lost(self, exc: Exception | None) -> None:
        whole = self._error is None and exc is None and self._ends_with_connection()
        if self._headed and not self._complete and whole:
            self._complete = True
        if self._used and not self._head_size:
            self._lost(Unanswered("the connection was closed before the answer"))
        else:
            self._lost(ConnectionResetError(str(exc or "the connection was closed")))

    def _ends_with_connection(self) -> bool:
        return (
            "content-length" not in self.headers and "chunked" not in self.headers.get("transfer-encoding", "").lower()
        )

    def _lost(self, error: OSError) -> None:
        self.open = False
        if self._error is None:
            self._error = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        self.heard_at = self._loop.time()  # from now on its silence counts again
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading() if paused else self._transport.resume_reading()

    def _watch(self) -> None:
        """One timer for each answer, set again only when it fires."""
        patience, now = self._patience, self._loop.time()
        heard_at = now if self._paused else self.heard_at  # while paused the server cannot send
        whole_s = patience.total_s if self._headed else min(patience.headers_s, patience.total_s)
        due = min(heard_at + patience.between_s, self._asked_at + whole_s)
        if due > now:
            self._timer = self._loop.call_at(due, self._watch)
            return
        self._timer = None
        self._lost(TimeoutError("no answer in time"))
        self.close()
