"""Live Queue: one mirror of all gateways' queues per process; each browser gets only the rows that it shows.

Gateways publish changes, and only while a page is open. A lost message is noticed by the version of the next one; then
the whole state is requested and read once for all browsers of this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from console.consumers import base
from console.consumers.base import REDIS_ERRORS, LiveConsumer
from console.live.live_view import capacity, fresh
from console.live.queue_mirror import GONE_AFTER_S, QueueMirror
from console.live.queue_view import RowWindow, ids_in, queue_frame, window_of
from controller.core.messages import LIVE_QUEUE, QueueChanges
from workers import live

ASK_EVERY_S = 0.5  # between requests for missing whole states
ENGINES_EVERY_S = 1.0
SCROLL_GAP_S = 0.05  # between frames while a browser scrolls


class QueueBoard:
    """The mirror and the sockets that show it. One per event loop."""

    def __init__(self) -> None:
        self.mirror = QueueMirror()
        self._sockets: set[QueueConsumer] = set()
        self.capacity: dict[str, str] = {}
        self._capacity_at = -ENGINES_EVERY_S
        self._reading = asyncio.Lock()
        self._asked_at = -ASK_EVERY_S
        self._reached_at = self._reached_since = 0.0

    def join(self, socket: QueueConsumer) -> None:
        self._sockets.add(socket)

    def leave(self, socket: QueueConsumer) -> None:
        """With the last socket the mirror is dropped: without a watcher gateways publish no changes."""
        self._sockets.discard(socket)
        if not self._sockets:
            self.mirror = QueueMirror()

    def take(self, changes: QueueChanges) -> None:
        before = self.mirror.version
        self.mirror.take(changes, live.shared_now())
        self._tell(before)

    async def catch_up(self) -> None:
        """Requests whole states and reads those that have arrived. May raise REDIS_ERRORS."""
        if self._reading.locked():
            return  # another socket is already reading for all
        async with self._reading:
            before = self.mirror.version
            now = time.monotonic()
            if now - self._asked_at >= ASK_EVERY_S:
                self._asked_at = now
                await live.aask_queue()
            for state in await live.aread_queue():
                self.mirror.take_whole(state, live.shared_now())
            self._tell(before)

    async def look_at_engines(self) -> None:
        """Updates, for all sockets, whether engines take new requests. May raise REDIS_ERRORS."""
        now = time.monotonic()
        if now - self._capacity_at < ENGINES_EVERY_S:
            return
        self._capacity_at = now
        found = capacity(fresh(await live.aread_fleet(), live.shared_now()))
        if found != self.capacity:
            self.capacity = found
            for socket in self._sockets:
                socket.look()

    def reached(self) -> None:
        """Redis answered. Drops gateways silent for GONE_AFTER_S, unless Redis itself was unavailable in that time."""
        now = time.monotonic()
        if now - self._reached_at > 2 * base.WATCH_PERIOD_S:
            self._reached_since = now
        self._reached_at = now
        if now - self._reached_since > GONE_AFTER_S:
            before = self.mirror.version
            self.mirror.forget_silent(live.shared_now())
            self._tell(before)

    def _tell(self, before: int) -> None:
        if self.mirror.version != before:
            for socket in self._sockets:
                socket.look()


_boards: WeakKeyDictionary[asyncio.AbstractEventLoop, QueueBoard] = WeakKeyDictionary()


def board() -> QueueBoard:
    loop = asyncio.get_running_loop()
    if loop not in _boards:
        _boards[loop] = QueueBoard()
    return _boards[loop]


class QueueConsumer(LiveConsumer):
    topic = "queue"
    group = LIVE_QUEUE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window = RowWindow()
        self._held: Sequence[str] | None = None  # the ids that waited when the user paused updates

    async def connect(self) -> None:
        self._board = board()
        self._scrolled = asyncio.Event()
        await super().connect()
        if self._open:
            self._board.join(self)

    async def disconnect(self, code: int) -> None:
        self._board.leave(self)
        await super().disconnect(code)

    async def mark_watched(self) -> None:
        await live.amark_watched(self.group)

    async def refresh(self) -> None:
        """Catches up if the mirror is empty (a new process) or behind."""
        self._board.reached()
        await self._board.look_at_engines()
        if self._board.mirror.behind or not self._board.mirror.gateways:
            await self._board.catch_up()

    def take(self, message: dict[str, Any]) -> bool:
        self._board.take(message["data"])
        return False  # the board wakes its sockets itself, if anything changed

    async def live_message(self, event: dict[str, Any]) -> None:
        await super().live_message(event)
        if self._board.mirror.behind:
            try:
                await self._board.catch_up()
            except REDIS_ERRORS:
                return  # `_keep_joined` reports it and retries

    def look(self) -> None:
        """Something changed. While updates are paused only departures are shown."""
        self._pending += 1
        self._changed.set()

    async def handle_message(self, message: dict[str, Any]) -> bool:
        if message.get("type") != "view":
            return await super().handle_message(message)
        window = window_of(message)
        if window is None:
            return False
        if not window.held:
            self._held = None
        elif self._held is None or (window.key, window.text) != (self._window.key, self._window.text):
            self._held = list(ids_in(self._board.mirror, window))
        self._window = window
        self._scrolled.set()
        self._changed.set()
        return True

    async def pause(self) -> None:
        """At most four frames a second; a browser that scrolls to other rows gets them sooner."""
        await asyncio.sleep(min(SCROLL_GAP_S, base.FRAME_GAP_S))
        try:
            async with asyncio.timeout(max(0.0, base.FRAME_GAP_S - SCROLL_GAP_S)):
                await self._scrolled.wait()
        except TimeoutError:
            pass
        self._scrolled.clear()

    def frame(self, snapshot: bool) -> dict[str, Any]:
        mirror = self._board.mirror
        ids = self._held if self._held is not None else ids_in(mirror, self._window)
        return queue_frame(mirror, self._window, ids, self._board.capacity)

    def age_s(self, now: float) -> float | None:
        oldest = self._board.mirror.oldest_at()
        return None if oldest is None else max(0.0, now - oldest)
