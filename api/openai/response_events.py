"""The events of background responses that are streamed: told to who asked for it, and kept so that a client whose
connection broke goes on where it was, at any gateway, while the response is computed or after it.

The gateway that computes a response has its newest events in memory, and writes them to Redis a few times a second, in
one compressed stream. Its own readers are served from memory as long as they keep up; those that fall behind, and those
at other gateways, read what is kept. So what a slow reader has not read takes no memory, and an engine never waits for
one. The events that end a response are not kept: they are made of the stored response, which alone says how it ended.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Any

import orjson

from api.openai.protocol.errors import KINDS, ApiError
from workers.steps import LARGEST_BYTES

FLUSH_S = 0.2  # between two writes of one response's events
CLOSE_TRIES = 4  # to write the last of them
TAIL_BYTES = 64 << 10  # of events that stay in memory once they are kept
UNWRITTEN_BYTES = 4 * LARGEST_BYTES  # of events that may wait for Redis; with more they are given up
READ_BYTES = 64 << 10  # of events that are told, or unpacked, at once
WINDOW_BITS, MEMORY_LEVEL, LEVEL = 13, 6, 3  # of the compression: 64 KiB of memory for each response
ENDS = tuple(b"event: %s\n" % kind for kind in (b"response.completed", b"response.incomplete", b"response.failed"))
ERROR = b"event: error\n"
BETWEEN = b"\n\n"
ENDED_WELL = ("completed", "incomplete")


def event(kind: str, number: int, fields: Mapping[str, Any]) -> bytes:
    told = orjson.dumps({**fields, "type": kind, "sequence_number": number})
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), told)


def end_events(response: Mapping[str, Any], number: int) -> bytes:
    """How a response ended, from the event with this number on. One that failed or was cancelled ends like any other
    stream that fails: OpenAI has no event that says cancelled."""
    status = response["status"]
    if status in ENDED_WELL:
        return event(f"response.{status}", number, {"response": response})
    error = response.get("error") or {"code": "cancelled", "message": "The response was cancelled."}
    return event("response.failed", number, {"response": response}) + error_event(error, number + 1)


def error_event(error: Mapping[str, Any], number: int) -> bytes:
    kind = KINDS.get(error["code"])
    told = {"param": None, "type": "server_error" if kind is None else kind.type, **error}
    return event("error", number, {**told, "error": told})


def dropped() -> ApiError:
    told = "stream: the events of this response are not kept any more. Read it without stream."
    return ApiError("events_dropped", told, param="stream")


Write = Callable[[int, bytes], Awaitable[str | None]]
Drop = Callable[[], Awaitable[None]]


class EventLog:
    """What one background response of this gateway has told so far. `write`: keeps more bytes after so many, and says
    what came of it (`workers.stored_responses.extend_events`), or None while it cannot. `lost`: they are not kept."""

    def __init__(self, write: Write, drop: Drop) -> None:
        self.next = 0  # number of the next event
        self.lost = self.over = False
        self._write, self._drop = write, drop
        self._events: deque[bytes] = deque()  # in memory
        self._bytes = 0  # of these
        self._kept = 0  # how many events are kept in Redis
        self._kept_bytes = 0  # of them in memory
        self._at = 0  # bytes there
        self._packer = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOW_BITS, MEMORY_LEVEL)
        self._piece, self._piece_to = b"", 0  # what is being written, and the number of the event after it
        self._news = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    @property
    def _first(self) -> int:
        """Number of the first event in memory."""
        return self.next - len(self._events)

    def add(self, raw: bytes) -> None:
        """Whole events of the stream. Those that end it are left out."""
        for each in raw.split(BETWEEN):
            if each and not each.startswith((*ENDS, ERROR)):
                self._events.append(each + BETWEEN)
                self._bytes += len(each) + len(BETWEEN)
                self.next += 1
        if self._bytes - self._kept_bytes > UNWRITTEN_BYTES:
            self.lost = True
        self._trim()
        self._tell()

    def since(self, number: int) -> list[bytes] | None:
        """Events after the one with this number, as many as are told at once. None: they are not in memory."""
        begin = number + 1 - self._first
        if begin < 0:
            return None
        found: list[bytes] = []
        size = 0
        for each in islice(self._events, begin, None):
            found.append(each)
            size += len(each)
            if size >= READ_BYTES:
                break
        return found

    async def news(self, within_s: float) -> None:
        """Wait for more events, or the end, at most for so long."""
        try:
            await asyncio.wait_for(self._news.wait(), within_s)
        except TimeoutError:
            return

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _trim(self) -> None:
        """Forget what is kept, or will never be, beyond the tail."""
        while self._bytes > TAIL_BYTES and (self.lost or self._first < self._kept) and len(self._events) > 1:
            size = len(self._events[0])
            if self._first < self._kept:
                self._kept_bytes -= size
            self._events.popleft()
            self._bytes -= size

    # ---- written --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._writer = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while not self.lost:
            await asyncio.sleep(FLUSH_S)
            await self.flush()
        await self._drop()

    async def flush(self) -> bool:
        """Keep all events. False: that cannot be done, now or at all (`lost`)."""
        while self._kept < self.next and not self.lost:
            if not self._piece:
                raw = b"".join(islice(self._events, self._kept - self._first, None))
                self._piece = self._packer.compress(raw) + self._packer.flush(zlib.Z_SYNC_FLUSH)
                self._piece_to = self.next
            came = await self._write(self._at, self._piece)
            if came is None:
                return False
            self.lost = self.lost or came != "kept"
            if self.lost:  # meanwhile, too much was told
                break
            self._at += len(self._piece)
            written = islice(self._events, self._kept - self._first, self._piece_to - self._first)
            self._kept_bytes += sum(map(len, written))
            self._kept, self._piece = self._piece_to, b""
            self._trim()
        return not self.lost

    async def close(self) -> None:
        """The last events are there: keep them, if that is possible soon."""
        self._stop()
        for _ in range(CLOSE_TRIES):
            if await self.flush() or self.lost:
                return
            await asyncio.sleep(FLUSH_S)
        self.lost = True

    def end(self) -> None:
        """How it ended is stored, or nobody writes it here any more."""
        self._stop()
        self.over = True
        self._tell()

    def _stop(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            self._writer = None


class Unpacked:
    """Events that were read from Redis, as they are unpacked: at most READ_BYTES at once, and never half of one.
    `number`: of the last one that was unpacked."""

    def __init__(self) -> None:
        self.number = -1
        self.at = 0  # bytes read so far
        self.empty = True  # more has to be read
        self._unpacker = zlib.decompressobj()
        self._packed, self._rest = b"", b""

    def feed(self, packed: bytes) -> None:
        self.at += len(packed)
        self._packed += packed
        self.empty = self.empty and not packed

    def after(self, number: int) -> bytes:
        """Some of the events after that one, or none: then there may be more until it is `empty`. Raises zlib.error."""
        raw = self._unpacker.decompress(self._packed, READ_BYTES)
        self._packed = self._unpacker.unconsumed_tail
        self.empty = len(raw) < READ_BYTES
        raw = self._rest + raw
        whole, between, self._rest = raw.rpartition(BETWEEN)
        if not between:
            return b""
        events = whole.split(BETWEEN)
        skipped = min(len(events), max(0, number - self.number))
        self.number += len(events)
        return b"".join(each + BETWEEN for each in events[skipped:])
