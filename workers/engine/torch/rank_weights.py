"""Weights of an engine with several tensor-parallel ranks: all of them have theirs, or none has."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from workers.engine.torch.group import RankGroup, RankLost
from workers.engine.torch.weight_store import TorchWeights
from workers.engine.weights.manager import LoadFailed, Source, StoreWrapper


class RankWeights(StoreWrapper[TorchWeights]):
    """From the disk or from the copies in host memory, each rank its own part. Not from or to another engine: its ranks
    would have to be split the same way, and each would need a way to its counterpart.
    `nbytes` is of this rank: the others have as much each, but for what all of them keep whole."""

    def __init__(self, own: TorchWeights, group: RankGroup) -> None:
        super().__init__(own)
        self._group = group

    @property
    def sending(self) -> bool:
        return False

    @property
    def shared_copy(self) -> bool:
        return False

    async def load(self, source: Source) -> int:
        if source.kind == "engine":
            raise LoadFailed("an engine of several tensor-parallel ranks cannot take weights from another engine")
        ask = asyncio.to_thread(self._group.ask, "load", source.kind)
        own, others = await asyncio.gather(self._own.load(source), ask, return_exceptions=True)
        if isinstance(own, int) and isinstance(others, list):
            await self._drop_copies()
            return own + sum(others)
        self._own.memory.release()
        try:
            copies = await asyncio.to_thread(self._group.ask, "release", None)
        except RankLost:
            copies = [0]  # one that does not say whether it has a copy is taken to have none
        if not (self._own.has_host_copy and all(copies)):  # one was damaged: the others are of no use without it
            await self._drop_copies()
        error = own if isinstance(own, BaseException) else others
        raise error if isinstance(error, LoadFailed) else LoadFailed(str(error))

    async def _drop_copies(self) -> None:
        self._own.memory.drop_host_copy()
        with contextlib.suppress(RankLost):
            await asyncio.to_thread(self._group.ask, "drop_copy", None)

    async def release(self, keep_host_copy: bool) -> None:
        """Where one of them can keep no copy, none has one, and all weights are gone."""
        ask = asyncio.to_thread(self._group.ask, "release", keep_host_copy)
        own, others = await asyncio.gather(self._own.release(keep_host_copy), ask, return_exceptions=True)
        failed = next((each for each in (own, others) if isinstance(each, BaseException)), None)
        if failed is None:
            return
        with contextlib.suppress(RankLost):
            await asyncio.to_thread(self._group.ask, "release", False)
        await self._own.release(keep_host_copy=False)
        raise failed if isinstance(failed, LoadFailed) else LoadFailed(str(failed))

    async def send(self, host: str, port: int, nonce: str) -> list[list[Any]]:
        raise LoadFailed("an engine of several tensor-parallel ranks does not send its weights")
