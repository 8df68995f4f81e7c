"""Allocates and releases the memory of the KV cache together with the weights.

An engine without weights does not need it, so a sleeping engine or a warm spare leaves its device to others. A weight
load allocates it first. If it is no longer available, the load fails as if its source had failed: the engine stays
asleep, and reports the error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from workers.engine.torch.kv.identity import ModelIdentity
from workers.engine.torch.model.cache import KVCache
from workers.engine.weights.manager import LoadFailed, Source, StoreWrapper, WeightStore
from workers.engine.weights.turns import LoadTurn

LOOK_S = 0.05
log = logging.getLogger("workers.engine")


class WithKv(StoreWrapper[WeightStore]):
    """A weight store together with the KV cache. `in_use`: whether a sequence still has blocks.

    KV that another engine will pull is kept for its lease, and KV that came from another engine belongs to a sequence
    that continues after the wake-up. So the memory is released when the last such sequence has ended. Its KV belongs to
    the released weights, so `identity` is read before they are released.
    """

    def __init__(
        self, own: WeightStore, cache: KVCache, in_use: Callable[[], bool], identity: ModelIdentity | None = None
    ) -> None:
        super().__init__(own)
        self._cache, self._in_use, self._identity = cache, in_use, identity
        self._waiting: asyncio.Task[None] | None = None
        self._moving = 0  # releases in progress, in threads; during a load the store itself reports no weights
        if identity is not None:
            identity.settled = lambda: own.present and not self._moving
        if not own.present:
            cache.give_up()

    async def load(self, source: Source, turn: LoadTurn | None = None) -> int:
        self._stop_waiting()
        await self._room()
        try:
            return await self._own.load(source, turn)
        except Exception:  # not for a cancelled load, which may still succeed in its thread
            self._release_unless_present()
            raise

    async def release(self, keep_host_copy: bool) -> None:
        if self._identity is not None:
            self._identity.now()
        self._moving += 1
        try:
            await self._own.release(keep_host_copy)
        finally:
            self._moving -= 1
            self._release_unless_present()

    async def send(self, host: str, port: int, nonce: str) -> list[list[object]]:
        return await self._own.send(host, port, nonce)

    async def _room(self) -> None:
        try:
            await asyncio.to_thread(self._cache.take)
        except (RuntimeError, MemoryError) as error:
            size = f"{self._cache.nbytes / 1e6:.1f} MB"
            raise LoadFailed(f"no memory for the KV cache of {size}: {error}"[:500]) from error

    def _release_unless_present(self) -> None:
        """Release the cache if there are no weights. Runs on the event loop, like all transfers of KV, so that the
        cache cannot come into use meanwhile."""
        if self._own.present:
            return
        self._stop_waiting()
        if self._in_use():
            log.info("the memory of the KV cache is kept until its last sequence has ended")
            self._waiting = asyncio.create_task(self._release_later())
        else:
            self._cache.give_up()

    async def _release_later(self) -> None:
        while self._in_use():
            await asyncio.sleep(LOOK_S)
        self._cache.give_up()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
