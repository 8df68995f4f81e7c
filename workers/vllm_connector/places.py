"""How many loads from one peer may move at a time: too many would only make each of them late."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from heapq import heappop, heappush

MOST_FROM_PEER = 16


class Places:
    """The load that is due first gets the next free place, and those without a deadline come last. A load that its
    sender's daemon holds takes none, or urgent ones would not even be asked for. On one event loop."""

    def __init__(self, most: int | None = None) -> None:
        self._free = MOST_FROM_PEER if most is None else most
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    @asynccontextmanager
    async def place(self, due: float | None) -> AsyncIterator[Callable[[], None]]:
        """Wait for one. `due`: wall clock, seconds. Yields what gives it up before the end; it may be called again."""
        await self._take(math.inf if due is None else due)
        taken = True

        def leave() -> None:
            nonlocal taken
            if taken:
                taken = False
                self._pass_on()

        try:
            yield leave
        finally:
            leave()

    async def _take(self, due: float) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (due, next(self._count), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just got its place
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            turn = heappop(self._waiting)[2]
            if not turn.done():  # those that were cancelled are
                turn.set_result(None)
                return
        self._free += 1
