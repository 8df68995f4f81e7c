"""One live topic to one browser: authorise, accept, snapshot, merged updates, heartbeat.

Memory is bounded whatever the browser does: messages of the channel layer change the newest state, and one task sends
that state, at most four times a second, each send with a time-out. A browser that stops reading is closed. Redis may be
unavailable at any time: the socket is accepted first, the group is joined with retries, and each frame carries the age
of its data. Frames carry a sequence number; a browser that misses one asks for a new snapshot.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, ClassVar
from weakref import WeakSet

import orjson
from channels.auth import get_user
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.db import Error as DatabaseError
from redis.exceptions import RedisError

from console.metrics import FRAMES_MERGED, FRAMES_SENT, SLOW_SOCKETS, SOCKETS
from console.session_keys import digest_of, group_of
from controller.core.staleness import STALE_AT_LEAST_S
from controller.selectors.roles import UserRole, role_of
from workers.live import LiveUnavailable

log = logging.getLogger(__name__)

FRAME_GAP_S = 0.25  # at most four frames a second
HEARTBEAT_S = 2.0
SEND_TIMEOUT_S = 5.0
WATCH_PERIOD_S = 3.0  # the mark in Redis lives ten seconds
REJOIN_MAX_S = 1.0  # the longest pause between attempts: how late a page may notice that Redis is back
REAUTHORISE_S = 30.0
CLOSE_NOT_ALLOWED = 4403
CLOSE_TOO_SLOW = 4408
CLOSE_TOO_MANY = 4429
SOCKETS_OF_SESSION = 40  # at once, in one process: twenty tabs, or a page that opens them in a loop
CLIENT_MESSAGE_BYTES = 2_000

# Raised by the channel layer and the Redis client while Redis is down, hangs or is full.
REDIS_ERRORS = (LiveUnavailable, RedisError, OSError, TimeoutError)


class LiveConsumer(AsyncWebsocketConsumer, ABC):
    """Base of all topics. Subclasses set `topic` and `group` and implement the abstract methods at the end."""

    topic: ClassVar[str]
    group: ClassVar[str]
    minimum_role: ClassVar[UserRole] = UserRole.VIEWER

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._open = False
        self._role = await database_sync_to_async(role_of)(self.scope["user"])
        if self._role < self.minimum_role:
            await self.close(CLOSE_NOT_ALLOWED)
            return
        await self.accept()
        self._session = self._groups()[-1]
        if sum(other._session == self._session for other in _open_sockets) >= SOCKETS_OF_SESSION:
            log.info("%s: a session has too many live connections", self.topic, extra={"action": "live_too_many"})
            await self.close(CLOSE_TOO_MANY)
            return
        self._open = True
        _open_sockets.add(self)
        SOCKETS.labels(self.topic).inc()
        self._changed = asyncio.Event()
        self._pending = 0
        self._seq = 0
        self._snapshot_due = True
        self._trouble = "Waiting for data"
        self._tasks = [asyncio.create_task(job()) for job in (self._keep_joined, self._send_frames, self._reauthorise)]

    async def disconnect(self, code: int) -> None:
        if self._open:
            self._open = False
            _open_sockets.discard(self)
            SOCKETS.labels(self.topic).dec()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._leave_group()

    async def _leave_group(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                for group in self._groups():
                    await self.channel_layer.group_discard(group, self.channel_name)
        except REDIS_ERRORS:
            log.debug("left %s while Redis was unavailable", self.group)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Handles a message of the browser; one that makes no sense ends the connection."""
        if self._role < self.minimum_role:
            await self.close(CLOSE_NOT_ALLOWED)
            return
        if not await self.handle_message(_parse(text_data)):
            await self.close(1003)

    async def live_message(self, event: dict[str, Any]) -> None:
        """From the channel layer, so Redis is up: takes the message into the newest state and wakes the sender."""
        self._trouble = ""
        if self.take(event["message"]):
            self._pending += 1
            self._changed.set()

    async def session_ended(self, event: dict[str, Any]) -> None:
        """From the channel layer when the user signs out. Closes without reading the session row again."""
        self._role = UserRole.NONE
        await self.close(CLOSE_NOT_ALLOWED)

    def _groups(self) -> list[str]:
        session = self.scope.get("session")
        key = getattr(session, "session_key", None)
        return [self.group, *([session_group(key)] if key else [])]

    # -- tasks ------------------------------------------------------------------------------------------------------

    async def _keep_joined(self) -> None:
        """Joins the group, then keeps re-reading the newest state from Redis and marking the topic as watched."""
        joined, pause = False, 0.5
        while True:
            try:
                async with asyncio.timeout(2.0):
                    if not joined:
                        for group in self._groups():
                            await self.channel_layer.group_add(group, self.channel_name)
                        joined = True
                    await self.mark_watched()
                    await self.refresh()
                self._trouble, pause = "", 0.5
                self._changed.set()
                await asyncio.sleep(WATCH_PERIOD_S)
            except (*REDIS_ERRORS, DatabaseError) as error:
                what = "The database" if isinstance(error, DatabaseError) else "Redis"
                log.info("%s: %s is unavailable (%s)", self.topic, what, error, extra={"action": "live_source_away"})
                self._trouble = f"{what} is unavailable"
                await asyncio.sleep(pause)
                pause = min(pause * 2, REJOIN_MAX_S)

    async def _send_frames(self) -> None:
        """The only sender: news, or a heartbeat without any. Ends if the browser stops reading or the role is lost."""
        while self._role >= self.minimum_role:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
                frame = self._news()
            except TimeoutError:
                frame = {"type": "heartbeat"}
            if not await self._send(frame):
                await self._drop_slow()
                return
            await self.pause()

    def _news(self) -> dict[str, Any]:
        self._changed.clear()
        FRAMES_MERGED.labels(self.topic).inc(max(0, self._pending - 1))
        self._pending = 0
        self._seq += 1
        snapshot, self._snapshot_due = self._snapshot_due, False
        return {"type": "snapshot" if snapshot else "update", "seq": self._seq, "data": self.frame(snapshot)}

    async def _send(self, frame: dict[str, Any]) -> bool:
        now = time.time()
        age = self.age_s(now)
        stale = bool(self._trouble) or age is None or age > self.stale_after_s()
        frame |= {"topic": self.topic, "at": now, "age_s": age, "stale": stale, "reason": self._trouble}
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self.send(text_data=orjson.dumps(frame).decode())
        except TimeoutError:
            return False
        FRAMES_SENT.labels(self.topic).inc()
        return True

    async def _drop_slow(self) -> None:
        """Stops all work for this browser. If the close frame gets stuck too, the server's pings end the socket."""
        SLOW_SOCKETS.labels(self.topic).inc()
        log.info("%s: the browser stopped reading", self.topic, extra={"action": "live_too_slow"})
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await self._leave_group()
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self.close(CLOSE_TOO_SLOW)
        except TimeoutError:
            log.info("%s: the close frame timed out too", self.topic)

    async def _reauthorise(self) -> None:
        """Ends the stream within half a minute of an expired session or a lost role. A sign-out ends it immediately
        (`session_ended`)."""
        while True:
            await asyncio.sleep(REAUTHORISE_S)
            try:
                self._role = await current_role(self.scope["session"])
            except DatabaseError:
                continue  # without PostgreSQL no session or role can have changed
            if self._role < self.minimum_role:
                await self.close(CLOSE_NOT_ALLOWED)
                return

    def want_snapshot(self) -> None:
        self._snapshot_due = True
        self._changed.set()

    # -- for topics -------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Waits between two frames; what happens meanwhile is merged into the next one."""
        await asyncio.sleep(FRAME_GAP_S)

    async def handle_message(self, message: dict[str, Any]) -> bool:
        """Handles a message of the browser; False if it makes no sense."""
        if message != {"type": "refetch"}:
            return False
        self.want_snapshot()
        return True

    @abstractmethod
    async def mark_watched(self) -> None: ...

    @abstractmethod
    async def refresh(self) -> None:
        """Reads the whole newest state: at the start, after an outage, and every few seconds against lost messages."""

    @abstractmethod
    def take(self, message: dict[str, Any]) -> bool:
        """Takes a message into the state; False if nothing changed."""

    @abstractmethod
    def frame(self, snapshot: bool) -> dict[str, Any] | orjson.Fragment:
        """The data of a frame, as values or JSON: everything, or what changed since the last frame."""

    @abstractmethod
    def age_s(self, now: float) -> float | None: ...

    def stale_after_s(self) -> float:
        return STALE_AT_LEAST_S


def session_group(key: str) -> str:
    """Channel-layer group of the sockets of one session. Hashed, so that Redis never holds the session key."""
    return group_of(digest_of(key))


async def current_role(session: Any) -> UserRole:
    """The role of the session's user as stored now, not when the socket was opened."""
    store = import_module(settings.SESSION_ENGINE).SessionStore(session.session_key)
    user = await get_user({"session": store})
    return await database_sync_to_async(role_of)(user)


def _parse(text: str | None) -> dict[str, Any]:
    if text is None or len(text) > CLIENT_MESSAGE_BYTES:
        return {}
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


_open_sockets: WeakSet[LiveConsumer] = WeakSet()  # of this process
