"""Engines whose borrowed prefixes are tested in one process, and how often and how fast they copy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controller.core.steps import PrefixEnded, Reserve, Seq
from controller.engine import EngineConfig, EngineScheduler
from controller.engine.kv_costs import KvCosts, MeasuredCosts
from controller.policies.batching import BATCHINGS
from tests.waiting import until_on_loop
from workers.engine.engine import Engine
from workers.engine.kv.disaggregation import Disaggregation
from workers.engine.kv.links import KvLink, Peer
from workers.engine.kv.store import EmulatedKv
from workers.flowd.client import FlowClient

PROMPT = list(range(100, 421))
LEAST = 64
LAYERS, TOKEN_BYTES = 2, 64


class FailingKv(EmulatedKv):
    """Writes fail with `error` when it is set."""

    error: Exception | None = None

    def write(self, seq: Seq, layer: int, start: int, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        super().write(seq, layer, start, data)


class Side:
    """One engine. Nothing runs on it; its prefix cache is filled by hand."""

    def __init__(
        self, block_size: int = 16, kv_blocks: int = 64, layers: int = LAYERS, flows: FlowClient | None = None
    ) -> None:
        sizes = EngineConfig(kv_blocks=kv_blocks, block_size=block_size, max_model_len=512, pinned_share=1.0)
        self.engine = Engine("m", EngineScheduler(sizes, BATCHINGS["chunked_prefill"]()), lambda: 1.0)
        self.store = FailingKv(layers, TOKEN_BYTES)
        self.stages = Disaggregation(self.engine, self.store, "t", "127.0.0.1", borrow_tokens=LEAST, flows=flows)

    def seq(self, prompt: list[int]) -> Seq:
        return Seq(self.engine.next_id("cmpl-r"), 0.0, len(prompt), 1, token_ids=prompt)

    def computes(self, prompt: list[int]) -> None:
        """The full blocks of the prompt are cached from now on."""
        seq = self.seq(prompt)
        self.engine.handle(Reserve(seq))
        self.engine.handle(PrefixEnded(seq, len(prompt)))

    def cached(self, prompt: list[int]) -> int:
        return self.engine.scheduler.blocks.cached_tokens(self.seq(prompt))

    @property
    def lost(self) -> int:
        return self.stages.prefixes.traffic.lost

    async def link_to(self, *others: Side) -> None:
        for other in others:
            await other.stages.start(0)
        at = [(f"p{index}", *other.stages.at) for index, other in enumerate(others)]
        self.stages.links.announce([Peer(*each) for each in at])
        await until_on_loop(lambda: len(self.stages.links.up()) == len(others))

    async def fetch(self, prompt: list[int]) -> None:
        await self.stages.prefixes.fetch(self.seq(prompt))

    def is_free(self) -> bool:
        blocks = self.engine.scheduler.blocks
        return blocks.free == self.engine.config.kv_blocks


class Counted:
    """What the borrower asks of a source: questions, and copies under way and in all. Copies wait for `go`, if set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, side: Side) -> None:
        self.asked = self.copies = self.under_way = self.most = 0
        self.go: asyncio.Event | None = None
        borrower, held, copy = side.stages.prefixes, side.stages.prefixes._held, side.stages.prefixes._copy

        async def counted_held(*args: Any) -> Any:
            self.asked += 1
            return await held(*args)

        async def counted_copy(*args: Any) -> None:
            self.copies += 1
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            try:
                if self.go is not None:
                    await self.go.wait()
                await copy(*args)
            finally:
                self.under_way -= 1

        monkeypatch.setattr(borrower, "_held", counted_held)
        monkeypatch.setattr(borrower, "_copy", counted_copy)


def moves(link: KvLink, bandwidth: float) -> None:
    """It was always so fast, bytes a second: one that is slower than it was is not asked."""
    link.health.bandwidth_bytes_s = link.health._best = bandwidth
    link.health.latency_s = 0.0


def measured(side: Side, bandwidth: float, token_s: float) -> None:
    """All links of a side are so fast, bytes a second, and so is its computing."""
    for link in side.stages.links.up():
        moves(link, bandwidth)
    side.engine.scheduler.measure(KvCosts(16, MeasuredCosts(prefill_s={100: token_s})))
