"""The memory of the KV cache comes and goes with the weights: an engine that has none of them has no use for it.

So a sleeping or warm engine leaves its device to others, and whatever loads the weights takes it first. Where it is not
there any more the load fails like one whose source failed: the engine sleeps on, and says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from workers.engine.torch.cache import KVCache
from workers.engine.torch.kv_model import ModelIdentity
from workers.engine.weights.manager import LoadFailed, Source, StoreWrapper, WeightStore

LOOK_S = 0.05
log = logging.getLogger("workers.engine")


class WithKv(StoreWrapper[WeightStore]):
    """A WeightStore (engine.weights) and the cache beside it. `in_use`: some sequence still has blocks.

    KV that another engine is to take outlives the step that made it by its lease, and KV that came from another engine
    belongs to a sequence that goes on when this one wakes: the memory is given up when the last of them is gone. Both
    are of the weights that go: `identity`, of what is in the cache, is taken before that.
    """

    def __init__(
        self, own: WeightStore, cache: KVCache, in_use: Callable[[], bool], identity: ModelIdentity | None = None
    ) -> None:
        super().__init__(own)
        self._cache, self._in_use, self._identity = cache, in_use, identity
        self._waiting: asyncio.Task[None] | None = None
        self._moving = 0  # releases under way, in threads: a load says by itself that nothing is present
        if identity is not None:
            identity.settled = lambda: own.present and not self._moving
        if not own.present:
            cache.give_up()

    async def load(self, source: Source) -> int:
        self._stop_waiting()
        await self._room()
        try:
            return await self._own.load(source)
        except Exception:  # one that is cancelled may come to its end all the same, in its thread
            self._let_go_unless_present()
            raise

    async def release(self, keep_host_copy: bool) -> None:
        if self._identity is not None:
            self._identity.now()
        self._moving += 1
        try:
            await self._own.release(keep_host_copy)
        finally:
            self._moving -= 1
            self._let_go_unless_present()

    async def send(self, host: str, port: int, nonce: str) -> list[list[object]]:
        return await self._own.send(host, port, nonce)

    async def _room(self) -> None:
        try:
            await asyncio.to_thread(self._cache.take)
        except (RuntimeError, MemoryError) as error:
            size = f"{self._cache.nbytes / 1e6:.1f} MB"
            raise LoadFailed(f"no memory for the KV cache of {size}: {error}"[:500]) from error

    def _let_go_unless_present(self) -> None:
        """On the loop, like all that reads or writes KV for others: what was not in use is not, when it goes."""
        if self._own.present:
            return
        self._stop_waiting()
        if self._in_use():
            log.info("the KV cache's memory is kept until the KV of the last sequence in it has gone")
            self._waiting = asyncio.create_task(self._give_up_later())
        else:
            self._cache.give_up()

    async def _give_up_later(self) -> None:
        while self._in_use():
            await asyncio.sleep(LOOK_S)
        self._cache.give_up()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
