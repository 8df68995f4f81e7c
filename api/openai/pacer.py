"""Token pacing (optional, TOKEN_PACING): tokens that come in bursts leave at the pace of the TPOT target.

Kairos' decode runs short sequences ahead and then lets them wait: their mean time per token meets its target, but a
reader sees bursts (sec. 2.3 of its paper has early tokens buffered and released little by little). With a share s of
the TPOT target as pace, token k after the first leaves at the first's time + k x s x TPOT, or when it comes if that is
later. An answer whose tokens were early thus ends later than it could, yet within its target for s up to 1; a late one
is unchanged. The engine is never slowed down: it is read as fast as it sends, and records hold the times at which
tokens came.

Not paced: answers in one piece, requests with an end-to-end deadline, and those without a TPOT target.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from api.openai.asgi import Message, Send
from controller.core.types import Targets

Clock = Callable[[], float]


def paced(send: Send, targets: Targets, share: float, clock: Clock, carries: Callable[[bytes], bool]) -> Send:
    """A paced `send`, or `send` itself for a request that is not paced. `carries`: does an event deliver a token?"""
    dated = targets.deadline_s is not None or targets.thinking_s is not None
    if share <= 0 or dated or not math.isfinite(targets.tpot_s) or targets.tpot_s <= 0:
        return send
    return Pacer(send, share * targets.tpot_s, clock, carries)


class Pacer:
    """A Send that holds tokens back. The last message returns when everything was sent; the others return at once."""

    def __init__(self, send: Send, pace_s: float, clock: Clock, carries: Callable[[bytes], bool]) -> None:
        self._send = send
        self._pace_s = pace_s
        self._clock = clock
        self._carries = carries
        self._waiting: deque[tuple[bytes, bool]] = deque()  # event, carries a token
        self._next_at = -math.inf  # when the next token may leave
        self._release: asyncio.Task[None] | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        self._hold(message.get("body", b""))
        if self._release is None or self._release.done():
            self._release = asyncio.get_running_loop().create_task(self._leave())
        if message.get("more_body"):
            return
        try:
            await self._release
        except asyncio.CancelledError:
            self._release.cancel()
            raise
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _hold(self, raw: bytes) -> None:
        """Add whole events, as the relay sends them; anything else goes with the event before it."""
        *events, rest = raw.split(b"\n\n")
        self._waiting.extend((event + b"\n\n", self._carries(event)) for event in events)
        if rest:
            self._waiting.append((rest, False))

    async def _leave(self) -> None:
        """Send until nothing waits. Stops at a client that is gone."""
        with suppress(OSError):
            while self._waiting:
                await self._one_more()

    async def _one_more(self) -> None:
        event, token = self._waiting[0]
        if token:
            wait_s = self._next_at - self._clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            begun = self._clock() if math.isinf(self._next_at) else self._next_at
            self._next_at = begun + self._pace_s  # a late token does not delay those after it
        self._waiting.popleft()
        message: dict[str, Any] = {"type": "http.response.body", "body": event, "more_body": True}
        await self._send(message)
