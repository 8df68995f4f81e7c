"""uvicorn's HTTP protocol with the limits that it lacks. uvicorn bounds neither the head of a request, nor the time for
head and body, nor the time that an answer waits for a client that does not read.

Work is done where a connection is opened or closed, or where something is late: a request that arrives whole costs a
few attribute reads. What is still being read is looked at once a second, by one timer for the whole server.

llhttp keeps what it has read of a header until the header ends, and calls nobody during chunk extensions, so bytes are
counted here, before it sees them.

Where everything is taken, room is made at the cost of whoever holds most: of the connections that only wait for a next
request, those of the address that keeps most of them; of unfinished heads, the largest of the address that holds most.
So a stranger that keeps to every limit takes places from itself alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import json
import termios
from array import array
from collections import Counter
from typing import Any, ClassVar, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from workers.http.limits import HttpLimits

CLOSED = "slackline.closed"  # in the scope of a request: why we closed its connection
CLIENT_STALLED = "client_stalled"
SWEEP_S = 1.0
# Thousands that were opened together are late together, and other requests must not wait until all are answered.
LATE_AT_ONCE = 50
LATE_PAUSE_S = 0.01
ADDRESS_SHARE = 1 / 8  # of `heads_bytes`, for the unfinished heads of one address
IDLE, HEAD, BODY = 0, 1, 2  # which part of a request is being read


class OpenConnection(Protocol):
    """What the book needs of a connection."""

    loop: asyncio.AbstractEventLoop

    def late(self, now: float) -> None:
        """What it reads did not come in time."""

    def close_idle(self) -> None:
        """Another connection needs its place."""

    def refuse_head(self) -> None:
        """Unfinished heads hold too much."""


class Heads:
    """The unfinished heads of one address."""

    def __init__(self) -> None:
        self.bytes = 0
        self.sizes: dict[OpenConnection, int] = {}

    def set(self, connection: OpenConnection, size: int) -> int:
        """Returns the bytes by which it grew."""
        more = size - self.sizes.pop(connection, 0)
        if size:
            self.sizes[connection] = size
        self.bytes += more
        return more

    def largest(self) -> OpenConnection:
        return max(self.sizes, key=self.sizes.__getitem__)


class ConnectionBook:
    """The open connections of one server: how many there are, in all and by address, and what unfinished heads hold.
    `closed`: how many were closed for which reason."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.open = 0
        self.by_address: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.idle: dict[str, dict[OpenConnection, None]] = {}  # by address, the longest idle first
        self.heads_bytes = 0  # read of heads that are not complete
        self.heads: dict[str, Heads] = {}  # the same by address
        self.reading: dict[OpenConnection, float] = {}  # when what each is still reading must have come, loop time
        self._sweep: asyncio.TimerHandle | None = None

    def opened(self, address: str) -> str:
        """Count a connection. Returns why it must be closed; "" if it may stay."""
        self.open += 1
        self.by_address[address] += 1
        if self.by_address[address] > self.limits.connections_per_address and not self._end_idle(address):
            return "too_many_from_address"
        if self.open > self.limits.connections and not self._end_idle(max(self.idle, key=self._idle_of, default="")):
            return "too_many_connections"
        return ""

    def gone(self, address: str) -> None:
        self.open -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]

    # ---- connections without a request ------------------------------------------------------------------------------

    def rests(self, connection: OpenConnection, address: str) -> None:
        """It waits for a next request."""
        self.idle.setdefault(address, {})[connection] = None

    def works(self, connection: OpenConnection, address: str) -> None:
        """It no longer waits."""
        resting = self.idle.get(address)
        if resting is not None and resting.pop(connection, self) is None and not resting:
            del self.idle[address]

    def _idle_of(self, address: str) -> int:
        return len(self.idle[address])

    def _end_idle(self, address: str) -> bool:
        """Close the connection of this address that has waited longest. False: none waits."""
        resting = self.idle.get(address)
        if not resting:
            return False
        longest = next(iter(resting))
        self.works(longest, address)
        self.closed["made_room"] += 1
        longest.close_idle()
        return True

    # ---- unfinished heads -------------------------------------------------------------------------------------------

    def holds(self, connection: OpenConnection, address: str, size: int) -> None:
        """`size` bytes of its head have been read. It, or one that holds more, is refused if that is too much."""
        of_address = self.heads.setdefault(address, Heads())
        self.heads_bytes += of_address.set(connection, size)
        if of_address.bytes > self.limits.heads_bytes * ADDRESS_SHARE:
            of_address.largest().refuse_head()
        elif self.heads_bytes > self.limits.heads_bytes:
            max(self.heads.values(), key=lambda heads: heads.bytes).largest().refuse_head()

    def released(self, connection: OpenConnection, address: str) -> None:
        """Its head is complete, or is not read further."""
        of_address = self.heads.get(address)
        if of_address is not None:
            self.heads_bytes += of_address.set(connection, 0)
            if not of_address.sizes:
                del self.heads[address]

    # ---- time -------------------------------------------------------------------------------------------------------

    def expect(self, connection: OpenConnection, due: float) -> None:
        """It must have read what it reads until `due`."""
        self.reading[connection] = due
        if self._sweep is None:
            limits = self.limits
            period_s = min(SWEEP_S, limits.head_s / 4, limits.body_s / 4)
            self._sweep = connection.loop.call_later(period_s, self._look, connection.loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweep = None
        now = loop.time()
        late = [connection for connection, due in self.reading.items() if due <= now]
        for connection in late[:LATE_AT_ONCE]:
            connection.late(now)
        if len(late) > LATE_AT_ONCE and self._sweep is None:
            self._sweep = loop.call_later(LATE_PAUSE_S, self._look, loop)
        elif self.reading and self._sweep is None:
            connection = next(iter(self.reading))
            self.expect(connection, self.reading[connection])


def address_of(client: tuple[str, int] | None) -> str:
    """Whom a connection is counted for: an IPv4 address, or the /64 of an IPv6 address, of which each host has 2^64."""
    host = client[0] if client else ""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else address.exploded[:19]


class _Refused(Exception):
    """Raised within a callback of the parser: this request is not read further."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Subclasses of `bounded` have their server's book and limits."""

    book: ClassVar[ConnectionBook]
    limits: ClassVar[HttpLimits]
    upload_paths: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.timeout_keep_alive = self.limits.keep_alive_s  # type: ignore[assignment]
        self._part = IDLE
        self._unparsed = 0  # bytes of the head so far; within a body, those since its last piece
        self._address: str | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._abort: asyncio.TimerHandle | None = None

    # ---- connections ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = address_of(self.client)
        if problem := self.book.opened(self._address):
            self.refuse(503, problem, "Too many connections are open.")
            return
        self.book.expect(self, self.loop.time() + self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        for timer in (self._stall, self._abort):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _forget(self) -> None:
        if self._address is not None:
            self._read()
            self.book.works(self, self._address)
            self.book.gone(self._address)
            self._address = None

    def handle_websocket_upgrade(self) -> None:
        self._forget()  # the other protocol counts it
        super().handle_websocket_upgrade()

    # ---- reading ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.book.works(self, self._address or "")
        most = self.limits.head_bytes
        while data:
            if self._part == BODY:
                self._unparsed += len(data)
                if not self._feed(data):
                    return
                if self._part == BODY and self._unparsed > most:
                    self.refuse(400, "bad_chunks", "Chunk extensions or trailers are too long.")
                    return
                break
            room = most - self._unparsed
            piece, data = data[:room], data[room:]
            self._unparsed += len(piece)
            if not self._feed(piece):
                return
            if self._part != BODY and self._unparsed >= most:
                self.refuse(431, "head_too_large", f"The head of a request may have at most {most} bytes.")
                return
        self._expect_rest()

    def _feed(self, data: bytes) -> bool:
        """False: the connection is closed, or is another protocol's."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
                return False
        except httptools.HttpParserError as error:
            if not isinstance(error.__context__, _Refused):  # else it was refused there
                self.refuse(400, "bad_http", "Invalid HTTP request received.")
            return False
        return not self.transport.is_closing()

    def _expect_rest(self) -> None:
        """Set the time for what is missing of this request, once for each part of it."""
        if self._part == IDLE and (self.cycle is not None and not self.cycle.response_complete):
            return  # whole, and being answered
        if self._part != BODY and self._unparsed:
            self.book.holds(self, self._address or "", self._unparsed)
            if self.transport.is_closing():
                return
        if self not in self.book.reading:
            self.book.expect(self, self.loop.time() + (self._body_s() if self._part == BODY else self.limits.head_s))

    def _read(self) -> None:
        """What was expected of the client has been read."""
        self.book.reading.pop(self, None)
        self.book.released(self, self._address or "")

    def _body_s(self) -> float:
        upload = bool(self.upload_paths) and str(self.scope.get("path", "")).startswith(self.upload_paths)
        return self.limits.upload_s if upload else self.limits.body_s

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = HEAD

    def on_headers_complete(self) -> None:
        if len(self.headers) > self.limits.headers:
            self.refuse(431, "too_many_headers", f"A request may have at most {self.limits.headers} headers.")
            raise _Refused
        if len(self.pipeline) >= self.limits.pipelined:
            self.refuse(400, "too_many_pipelined", "Too many requests were sent before their answers.")
            raise _Refused
        super().on_headers_complete()
        if not (self.parser.should_upgrade() and self._should_upgrade()):
            self.headers = []  # trailers would change the headers of a request that is being answered
        self._part, self._unparsed = BODY, 0
        self._read()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._part, self._unparsed = IDLE, 0
        self._read()

    def late(self, now: float) -> None:
        """What it reads did not come in time."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (busy and self._part != BODY):  # the next request waits for this one's answer
            self.book.reading[self] = now + self.limits.head_s
            return
        self._read()
        if self._part == BODY:
            within = f"{self._body_s():g} seconds"
            self.refuse(408, "request_timeout", f"The request body did not arrive within {within}.")
        elif self._part == HEAD or self._unparsed:
            self.refuse(408, "head_timeout", f"The head did not arrive within {self.limits.head_s:g} seconds.")
        else:
            self.book.closed["no_request"] += 1
            self.transport.close()

    # ---- sending ----------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_soon()
            return
        if self.pipeline:
            self.flow.pause_reading()  # or unread requests gather without an end
        elif self._part == IDLE and not self._unparsed:
            self.book.rests(self, self._address or "")
        if self._part == BODY:
            self._expect_rest()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_soon()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._abort_soon()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.limits.send_s, self._look_at_sending, self._unsent())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _look_at_sending(self, before: int) -> None:
        """Writers wait meanwhile, so what is missing from the buffers is what the client has taken in."""
        self._stall = None
        unsent = self._unsent()
        if before - unsent >= self.limits.send_bytes:
            self._stall = self.loop.call_later(self.limits.send_s, self._look_at_sending, unsent)
        else:
            self.hang_up(CLIENT_STALLED)

    def _unsent(self) -> int:
        """Bytes that the client has not acknowledged. The kernel holds megabytes and takes more only once a third of
        them is gone, so its queue is read as well as ours."""
        queued = array("i", [0])
        with contextlib.suppress(OSError, AttributeError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + queued[0]

    # ---- closing ----------------------------------------------------------------------------------------------------

    def close_idle(self) -> None:
        self.transport.close()
        self._abort_soon()

    def refuse_head(self) -> None:
        self._read()
        self.refuse(503, "too_many_heads", "Too many requests have sent a part of their head.")

    def refuse(self, status: int, reason: str, message: str) -> None:
        """Close, with an answer of the shape of all other errors if no answer is under way."""
        self.book.closed[reason] += 1
        if self.cycle is not None and not self.cycle.response_complete:
            cast(Any, self.cycle.scope)[CLOSED] = reason
            if self.cycle.response_started or self.pipeline or self._part != BODY:
                self.transport.abort()
                return
        elif self.cycle is not None and self._part == BODY:  # answered before its body was complete
            self.transport.close()
            self._abort_soon()
            return
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": reason}
        body = json.dumps({"error": error}).encode()
        fields = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + fields + body)
        self.transport.close()
        self._abort_soon()

    def hang_up(self, reason: str) -> None:
        """Close at once. What waits to be sent is dropped, and whoever waits for it goes on."""
        self.book.closed[reason] += 1
        if self.cycle is not None:
            cast(Any, self.cycle.scope)[CLOSED] = reason
        self.transport.abort()

    def _abort_soon(self) -> None:
        """A closing connection waits until its client has read everything, which may be never."""
        if self._abort is None:
            self._abort = self.loop.call_later(self.limits.send_s, self.transport.abort)


class CountedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket that its server's book counts. uvicorn's own pings close those that do not read."""

    book: ClassVar[ConnectionBook]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._address = address_of(self.client)
        self.book.opened(self._address)  # it has a place: it was counted until now

    def connection_lost(self, exc: Exception | None) -> None:
        self.book.gone(self._address)
        super().connection_lost(exc)


def bounded(limits: HttpLimits, upload_paths: tuple[str, ...] = ()) -> type[BoundedProtocol]:
    """The protocol of one server, for `uvicorn.Config(http=...)`, with a book of its own."""
    fields = {"book": ConnectionBook(limits), "limits": limits, "upload_paths": upload_paths}
    return cast(type[BoundedProtocol], type("Protocol", (BoundedProtocol,), fields))


def counted_websocket(book: ConnectionBook) -> type[CountedWebSocket]:
    return cast(type[CountedWebSocket], type("WebSocket", (CountedWebSocket,), {"book": book}))
