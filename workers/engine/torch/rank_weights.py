"""Weights of an engine with several tensor-parallel ranks: either all ranks have their part, or none has."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from workers.engine.torch.group import RankGroup, RankLost
from workers.engine.torch.weights.store import TorchWeights
from workers.engine.weights.manager import LoadFailed, Source, StoreWrapper
from workers.engine.weights.turns import LoadTurn


class RankWeights(StoreWrapper[TorchWeights]):
    """Each rank loads its own part, from the disk or from its copy in host memory. Transfers from and to other engines
    are not supported: they would need the same number of ranks, and a connection between each pair.

    `nbytes` is that of this rank. The others have the same, since tensors that are not split exist on each rank."""

    def __init__(self, own: TorchWeights, group: RankGroup) -> None:
        super().__init__(own)
        self._group = group

    @property
    def sending(self) -> bool:
        return False

    @property
    def shared_copy(self) -> bool:
        return False

    async def load(self, source: Source, turn: LoadTurn | None = None) -> int:
        if source.kind == "engine":
            raise LoadFailed("an engine of several tensor-parallel ranks cannot take weights from another engine")
        ask = asyncio.to_thread(self._group.ask, "load", source.kind)
        own, others = await asyncio.gather(self._own.load(source, turn), ask, return_exceptions=True)
        if isinstance(own, int) and isinstance(others, list):
            await self._drop_copies()
            return own + sum(others)
        self._own.memory.release()
        try:
            copies = await asyncio.to_thread(self._group.ask, "release", None)
        except RankLost:
            copies = [0]  # a rank that does not respond counts as one without a copy
        if not (self._own.has_host_copy and all(copies)):  # copies are useless unless every rank has one
            await self._drop_copies()
        error = own if isinstance(own, BaseException) else others
        raise error if isinstance(error, LoadFailed) else LoadFailed(str(error))

    async def _drop_copies(self) -> None:
        self._own.memory.drop_host_copy()
        with contextlib.suppress(RankLost):
            await asyncio.to_thread(self._group.ask, "drop_copy", None)

    async def release(self, keep_host_copy: bool) -> None:
        """Release the weights of all ranks. If one of them cannot keep a copy, no rank has a copy afterwards."""
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
