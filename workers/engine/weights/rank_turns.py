"""Turns of a load in a process that has no event loop: another rank of an engine with several."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from workers.engine.weights.turns import LoadTurns, load_turns
from workers.flowd.client import ANSWER_S, MEMORY, FlowClient


@contextmanager
def own_turns(path: str, size: int, to: str) -> Iterator[LoadTurns | None]:
    """Of a load of `size` bytes from host memory to `to`. `path`: the transfer daemon's socket; "" without one, then
    there are no turns. A daemon that cannot be reached within ANSWER_S holds nobody.

    The connection lives in a thread of its own for as long as the load, since a rank has nothing else to ask.
    """
    if not path or size <= 0:
        yield None
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="turns", daemon=True)
    thread.start()
    client = FlowClient(path)
    turns: LoadTurns | None = None
    try:
        turns = asyncio.run_coroutine_threadsafe(_begun(client, size, to), loop).result()
        yield turns
    finally:
        if turns is not None:
            turns.end()
        asyncio.run_coroutine_threadsafe(_ended(client), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _begun(client: FlowClient, size: int, to: str) -> LoadTurns | None:
    client.start()
    with suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            while not client.connected:
                await asyncio.sleep(0.01)
    return load_turns(client, size, to, over=MEMORY)


async def _ended(client: FlowClient) -> None:
    client.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
