"""Turns of weight loads on a shared link or memory: between two pieces a load asks whether it may go on.

Weights move in threads, while the client of the transfer daemon lives on the event loop. The side that has the bytes
asks: the engine that sends, or the one that reads a copy in host memory. The engine that receives is told of each piece
before it comes, so that it knows a held source from one that is gone.

Packets of weights keep their default class, the least urgent one: torch makes those connections, and they do not have
to be marked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from controller.flow.flows import FlowStage
from workers.flowd.client import LINK, Flow, FlowClient

PIECE_BYTES = 4 << 20  # of a scheduled load: what it can be held between
IN_FLIGHT_BYTES = 16 << 20  # that cannot be called back


@dataclass(slots=True)
class LoadTurn:
    """The turns of one load, for its record. `flow`: `scheduled`, or why it was not; "" without flow scheduling.
    `held_s`: seconds in which it might not move. `level`: its last one, 1 the most urgent."""

    flow: str = ""
    held_s: float = 0.0
    level: int = 0


class LoadTurns:
    """Turns of one load, for the thread that moves its bytes. Call `end` in any case.

    The load is announced when its first piece is due, so that it delays nobody while its engines meet. `turn` is kept
    up to date. `told`: called before each piece with its number, and each second of holding with the number of the last
    one. It may raise, which ends the load.
    """

    piece_bytes, in_flight_bytes = PIECE_BYTES, IN_FLIGHT_BYTES

    def __init__(
        self, submit: Callable[[], Flow], loop: asyncio.AbstractEventLoop, turn: LoadTurn | None = None
    ) -> None:
        self.told: Callable[[int, LoadTurn], None] = lambda number, turn: None
        self.turn = turn or LoadTurn()
        self._submit, self._loop = submit, loop
        self._flow: Flow | None = None
        self._number = 0

    def next(self, number: int) -> None:
        """Return once this piece may move."""
        if self._flow is None or not self._flow.may_send:
            asyncio.run_coroutine_threadsafe(self._permitted(), self._loop).result()
        self._number = number
        self._tell()

    def moved(self, nbytes: int) -> None:
        if self._flow is not None:
            self._loop.call_soon_threadsafe(self._flow.sent, nbytes)

    def end(self) -> None:
        if self._flow is not None:
            self._loop.call_soon_threadsafe(self._flow.end)

    async def _permitted(self) -> None:
        if self._flow is None:
            self._flow = self._submit()
        await self._flow.turn(self._still)

    async def _still(self) -> None:
        self._tell()

    def _tell(self) -> None:
        if (flow := self._flow) is not None:
            self.turn.flow, self.turn.held_s, self.turn.level = flow.reason, flow.held_s, flow.level
            self.told(self._number, self.turn)


def load_turns(
    flows: FlowClient | None, size: int, to: str, turn: LoadTurn | None = None, over: str = LINK
) -> LoadTurns | None:
    """Of a load of `size` bytes; None without flow scheduling. Call it on the event loop. `over`: what it takes
    bandwidth of."""
    if flows is None or flows.off or size <= 0:
        return None

    def submit() -> Flow:
        return flows.submit(FlowStage.WEIGHTS, size, to, None, over=over)

    return LoadTurns(submit, asyncio.get_running_loop(), turn)
