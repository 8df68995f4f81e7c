"""Turns sampled tokens into the text of one response: decodes them, applies stop strings, and lets the response
wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from controller.core.steps import FinishReason, Seq
from workers.engine.text.tokenizer import Decoder, StreamDecoder


class StopFilter:
    """Cuts a text at the first stop string. Text that could be the start of one is kept until that is decided."""

    __slots__ = ("_held", "_hold", "_keep", "_stops", "found")

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        """`keep`: whether the stop string itself stays in the text."""
        self._stops = stops
        self._keep = keep
        self._hold = max(map(len, stops)) - 1
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, last: bool) -> str:
        text = self._held + text
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits)
            return text[: at + len(self.found) if self._keep else at]
        keep = 0 if last else min(self._hold, len(text))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class Stream:
    """The text of one response. `pieces` has one text for each token, also empty ones, since clients count events."""

    __slots__ = (
        *("_decoder", "_every", "_filter", "_keep_stop", "_waiter"),
        *("expiry", "finish", "last_at", "pieces", "seq", "waited_out"),
    )

    def __init__(
        self,
        seq: Seq,
        stops: Sequence[str],
        wake_each: bool,
        keep_stop: bool = False,
        decoder: StreamDecoder | None = None,
    ) -> None:
        self.seq = seq
        self.expiry: asyncio.TimerHandle | None = None  # ends it if it has not begun by then
        self.waited_out = False  # it ended before it began, since it had waited too long
        self.pieces: list[str] = []
        self.finish: FinishReason | None = None
        self.last_at: float | None = None  # time of the newest token
        self._decoder = decoder or Decoder()
        self._filter = StopFilter(stops, keep_stop) if stops else None
        self._keep_stop = keep_stop
        self._every = wake_each
        self._waiter: asyncio.Future[None] | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the text; None if the model ended it."""
        found = self._filter.found if self._filter is not None else None
        return self.seq.stopped_by if found is None else found

    def push(self, token: int, finish: FinishReason | None) -> bool:
        """Take one token; True if a stop string ended the text with it."""
        text = self._text(token, finish)
        stopped = False
        if self._filter is not None:
            text = self._filter.feed(text, finish is not None)
            stopped = self._filter.found is not None
        self.pieces.append(text)
        self.finish = FinishReason.STOP if stopped else finish
        if self._every or self.finish is not None:
            self._wake()
        return stopped

    def _text(self, token: int, finish: FinishReason | None) -> str:
        """The text of a token. A token that ends a sequence has none, unless stops stay in the text."""
        if finish is FinishReason.STOP and not self._keep_stop:
            return self._decoder.rest()
        return self._decoder.feed(token, finish is not None)

    def end(self, reason: FinishReason) -> None:
        if self.finish is None:
            self.finish = reason
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def ready(self) -> None:
        """Return once there is text to send. Only one reader may wait."""
        while not (self.finish is not None or (self._every and self.pieces)):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self) -> list[str]:
        pieces, self.pieces = self.pieces, []
        return pieces
