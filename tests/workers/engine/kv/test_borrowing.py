"""Borrowed prefixes with both engines in one process: what the borrower asks for, and when it does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from controller.core.steps import Lend, PrefixEnded, Release, Reserve, Seq
from controller.engine import EngineConfig, EngineScheduler
from controller.policies.batching import BATCHINGS
from tests.waiting import until_on_loop
from workers.engine.engine import Engine
from workers.engine.kv.disaggregation import Disaggregation
from workers.engine.kv.links import Peer
from workers.engine.kv.store import EmulatedKv

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

    def __init__(self, block_size: int = 16, kv_blocks: int = 64) -> None:
        sizes = EngineConfig(kv_blocks=kv_blocks, block_size=block_size, max_model_len=512)
        self.engine = Engine("m", EngineScheduler(sizes, BATCHINGS["chunked_prefill"]()), lambda: 1.0)
        self.store = FailingKv(LAYERS, TOKEN_BYTES)
        self.stages = Disaggregation(self.engine, self.store, "t", "127.0.0.1", borrow_tokens=LEAST)

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


@pytest.fixture
async def sides() -> AsyncIterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(**sizes: int) -> Side:
        made.append(Side(**sizes))
        return made[-1]

    yield make
    for side in made:
        side.stages.close()


async def test_a_paused_engine_does_not_borrow(sides):
    """Asleep, it has no KV memory to write to."""
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    mine.engine.pause(release_kv=True)
    await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), mine.lost, source.stages.lender.traffic.lent) == (0, 0, 0)
    mine.engine.resume()
    await mine.fetch(PROMPT)
    assert mine.cached(PROMPT) == 320


async def test_a_copy_that_cannot_be_written_is_computed_and_logged(sides, caplog):
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    mine.store.error = IndexError("list index out of range")
    with caplog.at_level(logging.WARNING):
        await mine.fetch(PROMPT)
    assert "list index out of range" in caplog.text
    assert (mine.cached(PROMPT), mine.lost) == (0, 1)
    assert mine.is_free()
    mine.store.error = None
    await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), mine.lost) == (320, 1)


async def test_a_lender_that_has_computed_more_meanwhile_sends_what_was_asked_for(sides, monkeypatch):
    """It computes the prompt in chunks: the second chunk ends between the question and the copy."""
    source, mine = sides(), sides()
    source.computes(PROMPT[:128])
    await mine.link_to(source)
    lend = source.stages.lender._lend

    async def later(seq: Seq, *args: Any) -> None:
        source.engine.handle(Release(seq))
        source.computes(PROMPT)
        source.engine.handle(Lend(seq))
        await lend(seq, *args)

    monkeypatch.setattr(source.stages.lender, "_lend", later)
    await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), mine.lost) == (128, 0)


@pytest.mark.parametrize(
    ("there", "here", "cached"),
    [(16, 32, 288), (32, 16, 320), (48, 32, 288), (32, 48, 288)],
)
async def test_blocks_of_another_size_are_lent(sides, there, here, cached):
    """As far as both have full blocks."""
    source, mine = sides(block_size=there), sides(block_size=here)
    source.computes(PROMPT[:310] if there == 16 else PROMPT)
    await mine.link_to(source)
    await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), mine.lost) == (cached, 0)
    assert mine.is_free()
    assert source.is_free()


async def test_a_lender_that_has_less_meanwhile_lends_nothing(sides, monkeypatch):
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    named = source.stages.lender._named

    async def forgotten(asked: dict[str, Any], reader: asyncio.StreamReader) -> Seq:
        if asked["op"] == "lend":
            source.engine.reset_cache()
        return await named(asked, reader)

    monkeypatch.setattr(source.stages.lender, "_named", forgotten)
    await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), mine.lost) == (0, 1)
    assert mine.is_free()
