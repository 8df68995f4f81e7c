"""Readers of a background response's events: the client that began it, and those that name its id, at any gateway.

Where the response is computed they are told each event at once; at other gateways within half a second.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import TypeVar

from api.openai.asgi import EVENT_STREAM, NO_CACHE, Header, Receive, Send
from api.openai.protocol.errors import ApiError, key_revoked, shutting_down
from api.openai.protocol.schemas import wrong
from api.openai.response_events import ENDED_WELL, Unpacked, dropped, end_events, error_event
from api.openai.stored_responses import StoredResponses, unavailable

T = TypeVar("T")

LOOK_S = 0.2  # between two looks for more events at Redis
CHECK_S = 1.0  # how often a reader that hears nothing looks whether its key still works
PATIENCE_S = 10.0  # how long a reader waits for Redis to come back
MOST_READERS = 100  # of one tenant at one gateway, of responses by their id


class ResponseReader:
    """One reader, which has had the events up to `number`. `key_id`: of the API key that it came with. `turn`: its
    tenant's readers unpack one after the other. `closing`: whether this gateway stops."""

    def __init__(
        self,
        responses: StoredResponses,
        tenant: str,
        response_id: str,
        number: int,
        *,
        key_id: int,
        turn: asyncio.Lock,
        closing: Callable[[], bool],
    ) -> None:
        self.number = number
        self.key_id = key_id
        self.refused: ApiError | None = None  # why it may not read on
        self._turn = turn
        self._closing = closing
        self._responses = responses
        self._name = (tenant, response_id)
        self._log = responses.logs.get(self._name)
        self._kept = Unpacked()
        self._ended = False  # when what was read of Redis was read

    def _check(self) -> None:
        """A gateway that stops ends its own responses first; readers of others go on elsewhere. Raises ApiError."""
        if self.refused is not None:
            raise self.refused
        if self._log is None and self._closing():
            raise shutting_down()

    async def begin(self) -> None:
        """Before the answer begins. Raises ApiError: there is no such response, or nothing of it can be streamed."""
        found = await self._responses.find(*self._name)
        if found.events is None:
            told = "must be false: only a response that was created with background and stream true has events"
            raise wrong("stream", told)
        if not found.open and found.response["status"] in ENDED_WELL:
            if self.number > found.events:
                raise wrong("starting_after", f"is beyond the last event of this response, {found.events}")
            if self.number + 1 >= found.events:  # what is kept of its events is not needed
                self._ended = True
                return
        log = self._log
        if log is None or log.since(self.number) is None:
            if log is not None and log.lost:
                raise dropped()
            await self._look()

    async def more(self) -> bytes:
        """Its next events, as soon as there are any; b"" when it has had all before those that end the stream. Raises
        ApiError."""
        while True:
            self._check()
            log = self._log
            found = None if log is None else log.since(self.number)
            if found:
                self.number += len(found)
                return b"".join(found)
            if log is not None and found is not None:
                if log.over:
                    return b""
                await log.news(CHECK_S)
            elif log is not None and log.lost:
                raise dropped()
            elif not self._kept.empty:
                if events := await self._unpacked():
                    return events
            elif self._ended:
                return b""
            elif not await self._patiently(self._look):
                await asyncio.sleep(LOOK_S)

    async def _unpacked(self) -> bytes:
        async with self._turn:
            await asyncio.sleep(0)  # what others do comes in between
            try:
                events = self._kept.after(self.number)
            except zlib.error:
                raise dropped() from None
        self.number = max(self.number, self._kept.number)
        return events

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What it asks, while Redis may be away for a moment. Raises ApiError."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        while True:
            try:
                return await ask()
            except ApiError as error:
                if error.code != "responses_unavailable" or loop.time() > until:
                    raise
            await asyncio.sleep(LOOK_S)
            self._check()

    async def _look(self) -> bool:
        """Read what has been kept since. False: nothing. Raises ApiError."""
        found = await self._responses.look(*self._name, self._kept.at)
        if found.state == "gone" or (found.state == "open" and self._name not in self._responses.open):
            await self._responses.find(*self._name)  # deleted; or its gateway died, and then it has ended now
        if found.state != "gone" and found.size <= self._kept.at and (found.size < self._kept.at or not found.size):
            raise dropped()
        self._kept.feed(found.more)
        self._ended = found.state == "ended"
        return bool(found.more) or self._ended

    async def end(self) -> bytes:
        """The events that end the stream; none for a reader that has had them. Raises ApiError."""
        found = await self._patiently(lambda: self._responses.find(*self._name))
        status = found.response["status"]
        if found.open:  # Redis was away for so long that it could not be stored how it ended
            raise unavailable()
        if status not in ENDED_WELL:  # a dead gateway may have told more than it kept: all readers hear of the end
            return end_events(found.response, self.number + 1)
        assert found.events is not None
        if self.number + 1 < found.events:
            raise dropped()
        return end_events(found.response, found.events) if self.number < found.events else b""

    def failed(self, error: ApiError) -> bytes:
        """The last event for a reader that cannot be told more. It has the number of the one before: the reader goes on
        after that."""
        told = {"code": error.code, "message": error.message, "param": error.param, "type": error.type}
        return error_event(told, max(0, self.number))


class ResponseReaders:
    """All that read events at one gateway. `closing`: whether it stops."""

    def __init__(self, responses: StoredResponses, closing: Callable[[], bool]) -> None:
        self._responses, self._closing = responses, closing
        self._by_id: Counter[str] = Counter()  # by tenant
        self._turns: dict[str, asyncio.Lock] = {}
        self._all: set[ResponseReader] = set()

    async def tell_begun(
        self, tenant: str, response_id: str, key_id: int, receive: Receive, send: Send, headers: Sequence[Header]
    ) -> None:
        """The events of a response that has just begun here, to the client that began it."""
        reader = self._reader(tenant, response_id, -1, key_id)
        await self._tell(reader, receive, send, headers)

    async def tell_after(
        self, tenant: str, response_id: str, number: int, key_id: int, receive: Receive, send: Send
    ) -> None:
        """The events of a response after the one with this number. Raises ApiError."""
        if self._by_id[tenant] >= MOST_READERS:
            told = f"stream: over the limit of {MOST_READERS} streams of stored responses at once."
            raise ApiError("rate_limit_exceeded", told, param="stream", retry_after_s=1.0)
        self._by_id[tenant] += 1
        try:
            reader = self._reader(tenant, response_id, number, key_id)
            await reader.begin()
            await self._tell(reader, receive, send, ())
        finally:
            self._by_id[tenant] -= 1

    def _reader(self, tenant: str, response_id: str, number: int, key_id: int) -> ResponseReader:
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        told = (self._responses, tenant, response_id, number)
        return ResponseReader(*told, key_id=key_id, turn=turn, closing=self._closing)

    async def _tell(self, reader: ResponseReader, receive: Receive, send: Send, headers: Sequence[Header]) -> None:
        self._all.add(reader)
        try:
            await tell(reader, receive, send, headers)
        finally:
            self._all.discard(reader)

    def end_revoked(self, key_ids: Container[int]) -> None:
        """As `Runtime.end_revoked`."""
        for reader in self._all:
            if reader.key_id in key_ids:
                reader.refused = key_revoked()


async def tell(reader: ResponseReader, receive: Receive, send: Send, headers: Sequence[Header]) -> None:
    """Answer with the events. Returns when all are out or the client has gone: that ends no response."""
    telling = asyncio.ensure_future(_tell(reader, send, headers))
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((telling, gone), return_when=asyncio.FIRST_COMPLETED)
        if telling.done():
            telling.result()
    finally:
        telling.cancel()
        gone.cancel()


async def _tell(reader: ResponseReader, send: Send, headers: Sequence[Header]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [EVENT_STREAM, NO_CACHE, *headers]})
    try:
        while events := await reader.more():
            await send({"type": "http.response.body", "body": events, "more_body": True})
        last = await reader.end()
    except ApiError as error:
        last = reader.failed(error)
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
