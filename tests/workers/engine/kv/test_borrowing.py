"""Borrowed prefixes with both engines in one process: what the borrower asks for, and when it does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from controller.core.steps import Lend, PrefixEnded, Release, Reserve, Seq
from controller.engine import EngineConfig, EngineScheduler
from controller.engine.kv_costs import KvCosts, MeasuredCosts
from controller.policies.batching import BATCHINGS
from tests.waiting import until_on_loop
from workers.engine.engine import Engine
from workers.engine.kv import digests, lender, link_health, prefixes
from workers.engine.kv import links as kv_links
from workers.engine.kv.disaggregation import Disaggregation
from workers.engine.kv.links import KvLink, Peer
from workers.engine.kv.prefixes import MOST_FETCHES
from workers.engine.kv.store import EmulatedKv
from workers.engine.kv.transfer import KvConnection
from workers.engine.kv.wire import KvTransferError
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


@pytest.fixture
async def sides(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Side]]:
    monkeypatch.setattr(prefixes, "ASK_S", 30.0)  # a busy machine may answer later than an engine waits
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


async def test_a_borrowed_prefix_ends_no_checkpoint(sides):
    """Its lease was promised to branches."""
    source, mine = sides(), sides(kv_blocks=32)
    source.computes(PROMPT)
    await mine.link_to(source)
    kept = mine.seq([7] * 320)
    kept.checkpoint = "kept"
    mine.engine.handle(Reserve(kept))
    kept.computed = kept.prompt_tokens
    mine.engine.scheduler.checkpoints.keep(kept)
    await mine.fetch(PROMPT)
    assert mine.engine.scheduler.checkpoints.holds(kept)
    assert (mine.cached(PROMPT), source.stages.lender.traffic.lent) == (0, 0)


# ---- many prompts at once -------------------------------------------------------------------------------------------


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


async def test_prompts_that_begin_alike_are_asked_for_and_copied_once(sides, monkeypatch):
    source, mine = sides(), sides(kv_blocks=1024)
    source.computes(PROMPT)
    await mine.link_to(source)
    counted = Counted(monkeypatch, mine)
    await asyncio.gather(*(mine.fetch([*PROMPT, 1000 + n]) for n in range(30)))
    assert (counted.asked, counted.copies) == (1, 1)
    assert mine.stages.prefixes.traffic.tokens == 320
    assert all(mine.cached([*PROMPT, 1000 + n]) == 320 for n in range(30))


async def test_one_that_waited_borrows_what_is_still_missing(sides, monkeypatch):
    """The first prompt has only a part of what the second has in common with the lender."""
    source, mine = sides(), sides(kv_blocks=1024)
    source.computes(PROMPT)
    await mine.link_to(source)
    counted = Counted(monkeypatch, mine)
    await asyncio.gather(mine.fetch(PROMPT[:161]), mine.fetch(PROMPT))
    assert mine.cached(PROMPT) == 320
    assert (counted.copies, mine.stages.prefixes.traffic.tokens) == (2, 320)


async def test_what_one_could_not_have_the_others_do_not_ask_for_again(sides, monkeypatch):
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    counted = Counted(monkeypatch, mine)
    mine.store.error = IndexError("broken")
    await asyncio.gather(*(mine.fetch([*PROMPT, 1000 + n]) for n in range(10)))
    assert (counted.copies, mine.lost, mine.cached(PROMPT)) == (1, 1, 0)
    mine.store.error = None
    await mine.fetch(PROMPT)
    assert mine.cached(PROMPT) == 320


async def test_when_the_first_client_goes_away_another_one_borrows(sides, monkeypatch):
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    counted = Counted(monkeypatch, mine)
    counted.go = asyncio.Event()
    first, *others = [asyncio.ensure_future(mine.fetch(PROMPT)) for _ in range(3)]
    await until_on_loop(lambda: counted.under_way == 1)
    first.cancel()
    others[0].cancel()
    await until_on_loop(lambda: counted.copies == 2)
    counted.go.set()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert (mine.cached(PROMPT), counted.copies) == (320, 2)
    assert mine.is_free()


async def test_few_are_borrowed_at_once_and_the_rest_is_computed(sides, monkeypatch):
    prompts = [[*range(1000 * n, 1000 * n + 97)] for n in range(1, MOST_FETCHES + 6)]
    source, mine = sides(kv_blocks=1024), sides(kv_blocks=1024)
    for prompt in prompts:
        source.computes(prompt)
    await mine.link_to(source)
    counted = Counted(monkeypatch, mine)
    counted.go = asyncio.Event()
    fetches = [asyncio.ensure_future(mine.fetch(prompt)) for prompt in prompts]
    await until_on_loop(lambda: sum(each.done() for each in fetches) == 5)
    await until_on_loop(lambda: counted.under_way == MOST_FETCHES)
    counted.go.set()
    await asyncio.gather(*fetches)
    assert (counted.most, counted.copies) == (MOST_FETCHES, MOST_FETCHES)
    assert [mine.cached(prompt) for prompt in prompts] == [96] * MOST_FETCHES + [0] * 5
    await mine.fetch(prompts[-1])
    assert mine.cached(prompts[-1]) == 96


async def test_prompts_with_nothing_more_in_common_than_is_here_do_not_wait_for_each_other(sides, monkeypatch):
    """Conversations with one system prompt, which is cached already."""
    prompts = [[*PROMPT[:160], *range(1000 * n, 1000 * n + 97)] for n in (1, 2)]
    source, mine = sides(), sides()
    mine.computes(PROMPT[:160])
    for prompt in prompts:
        source.computes(prompt)
    await mine.link_to(source)
    counted = Counted(monkeypatch, mine)
    counted.go = asyncio.Event()
    fetches = [asyncio.ensure_future(mine.fetch(prompt)) for prompt in prompts]
    await until_on_loop(lambda: counted.under_way == 2, within_s=3.0)
    counted.go.set()
    await asyncio.gather(*fetches)
    assert [mine.cached(prompt) for prompt in prompts] == [256, 256]


# ---- whether a copy pays --------------------------------------------------------------------------------------------


def moves(link: KvLink, bandwidth: float) -> None:
    """It was always so fast, bytes a second: one that is slower than it was is not asked."""
    link.health.bandwidth_bytes_s = link.health._best = bandwidth
    link.health.latency_s = 0.0


def measured(side: Side, bandwidth: float, token_s: float) -> None:
    """All links of a side are so fast, bytes a second, and so is its computing."""
    for link in side.stages.links.up():
        moves(link, bandwidth)
    side.engine.scheduler.measure(KvCosts(16, MeasuredCosts(prefill_s={100: token_s})))


@pytest.mark.parametrize(
    ("bandwidth", "token_s", "cached"),
    [(1e6, 1e-3, 320), (1e6, 1e-4, 0), (1e5, 1e-3, 0), (1e5, 1e-2, 320)],
)
async def test_what_takes_longer_to_copy_than_to_compute_is_computed(sides, bandwidth, token_s, cached):
    """320 tokens of 128 bytes take 41 ms at 1 MB/s."""
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    measured(mine, bandwidth, token_s)
    await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), mine.lost, mine.stages.prefixes.traffic.dearer) == (cached, 0, int(not cached))
    assert mine.is_free()


@pytest.mark.parametrize(("queue_s", "cached"), [(0.1, 320), (0.5, 0)])
async def test_a_copy_behind_others_on_the_lenders_link_takes_longer(sides, monkeypatch, queue_s, cached):
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    measured(mine, 1e6, 1e-3)

    async def queued() -> float:
        return queue_s

    monkeypatch.setattr(type(source.stages.server.turns), "queue_s", lambda turns: queued())
    await mine.fetch(PROMPT)
    assert mine.cached(PROMPT) == cached


async def test_the_lender_that_saves_the_most_time_lends(sides):
    """The second one has less, over a link that is much faster."""
    most, fast, mine = sides(), sides(), sides()
    most.computes(PROMPT)
    fast.computes(PROMPT[:160])
    await mine.link_to(most, fast)
    measured(mine, 1e9, 1e-3)
    moves(mine.stages.links.up()[0], 1.5e5)
    await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), most.stages.lender.traffic.lent, fast.stages.lender.traffic.lent) == (160, 0, 1)


async def test_a_layer_that_is_late_is_computed(sides, monkeypatch):
    """As soon as computing the prefix would have taken as long."""
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    measured(mine, 1e9, 1e-4)
    monkeypatch.setattr(prefixes, "LEAST_PATIENCE_S", 0.05)
    never = asyncio.Event()

    async def held(*args: Any) -> None:
        await never.wait()

    monkeypatch.setattr(source.stages.lender, "_lend", held)
    async with asyncio.timeout(8.0):  # the wire itself gives up after 10 s without data
        await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), mine.lost) == (0, 1)
    assert mine.is_free()
    never.set()


async def test_a_copy_whose_layers_come_slowly_is_late_as_a_whole(sides, monkeypatch):
    """No layer is late, but all of them would take a second."""
    source, mine = sides(layers=20), sides(layers=20)
    source.computes(PROMPT)
    await mine.link_to(source)
    measured(mine, 1e9, 1e-4)
    monkeypatch.setattr(prefixes, "LEAST_PATIENCE_S", 0.2)
    layer = KvConnection._layer

    async def slow(*args: Any) -> None:
        await asyncio.sleep(0.05)
        await layer(*args)

    monkeypatch.setattr(KvConnection, "_layer", slow)
    await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), mine.lost) == (0, 1)
    assert mine.is_free()
    assert mine.stages.links.up()[0].health.wants_probe


async def test_a_copy_that_its_prompt_does_not_wait_for_yet_ends_at_the_limit_all_the_same(sides, monkeypatch):
    """The prompt is queued for longer than a copy may last, and each layer comes after a moment."""
    source, mine = sides(layers=20), sides(layers=20)
    source.computes(PROMPT)
    await mine.link_to(source)
    borrower = mine.stages.prefixes
    measured(mine, 1e9, 1e-3)
    monkeypatch.setattr(borrower, "_limit_s", 0.5)
    layer = KvConnection._layer

    async def slow(*args: Any) -> None:
        for _ in range(20):
            await asyncio.sleep(0.01)
            for copy in borrower.moving:
                copy.coming.layers = max(1, copy.coming.layers)
                assert borrower._computes(copy) is None
        await layer(*args)

    monkeypatch.setattr(KvConnection, "_layer", slow)
    async with asyncio.timeout(8.0):
        await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), mine.lost) == (0, 1)
    assert mine.is_free()


async def test_a_link_that_looked_too_slow_is_measured_again(sides):
    """Nothing is copied over it, so no copy would show that it is fast."""
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    measured(mine, 1e5, 1e-4)
    health = mine.stages.links.up()[0].health
    assert not health.wants_probe
    await mine.fetch(PROMPT)
    assert (mine.stages.prefixes.traffic.dearer, health.wants_probe) == (1, True)


async def test_a_link_is_not_probed_while_a_copy_uses_it(sides, monkeypatch):
    monkeypatch.setattr(kv_links, "PING_S", 0.01)
    monkeypatch.setattr(kv_links, "PROBE_S", 0.02)
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    measured(mine, 1e9, 1.0)
    health = mine.stages.links.up()[0].health
    lend, begun, goes_on = source.stages.lender._lend, asyncio.Event(), asyncio.Event()

    async def held(*args: Any) -> None:
        begun.set()
        await goes_on.wait()
        await lend(*args)

    monkeypatch.setattr(source.stages.lender, "_lend", held)
    fetching = asyncio.ensure_future(mine.fetch(PROMPT))
    await asyncio.wait_for(begun.wait(), 10.0)
    health.doubted()
    before = health.measurements
    await asyncio.sleep(0.3)
    assert (health.measurements, health.wants_probe) == (before, True)
    goes_on.set()
    await fetching
    health.doubted()
    await until_on_loop(lambda: not health.wants_probe)


async def test_copies_beside_each_other_do_not_measure_the_link(sides, monkeypatch):
    """Each has only a part of it; and each counts its own bytes."""
    prompts = [[*range(1000 * n, 1000 * n + 97)] for n in (1, 2, 3)]
    source, mine = sides(), sides()
    for prompt in prompts:
        source.computes(prompt)
    await mine.link_to(source)
    measured(mine, 1e9, 1.0)
    monkeypatch.setattr(link_health, "SMALLEST_BYTES", 1)
    health = mine.stages.links.up()[0].health
    lend, under_way = source.stages.lender._lend, 0

    async def together(*args: Any) -> None:
        nonlocal under_way
        under_way += 1
        await until_on_loop(lambda: under_way >= 2)
        await lend(*args)

    monkeypatch.setattr(source.stages.lender, "_lend", together)
    await asyncio.gather(*(mine.fetch(prompt) for prompt in prompts[:2]))
    each = 96 * LAYERS * TOKEN_BYTES
    assert (health.transfers, health.bytes) == (2, 2 * each)
    assert (health.bandwidth_bytes_s, health.wants_probe) == (1e9, True)
    await mine.fetch(prompts[2])
    assert (health.transfers, health.bytes) == (3, 3 * each)
    assert health.bandwidth_bytes_s != 1e9


# ---- whom to ask ----------------------------------------------------------------------------------------------------

OTHERS = [[*range(1000 * n, 1000 * n + 97)] for n in range(1, 6)]


@pytest.fixture
def long_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "FRESH_S", 60.0)


async def test_engines_that_had_nothing_of_a_prompt_are_not_asked(sides, long_fresh):
    first, second, mine = sides(), sides(), sides()
    first.computes(PROMPT)
    second.computes(OTHERS[0])
    await mine.link_to(first, second)
    traffic = mine.stages.prefixes.traffic
    await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), traffic.asked, traffic.spared) == (320, 2, 0)
    await mine.fetch(OTHERS[0])
    assert (mine.cached(OTHERS[0]), traffic.asked, traffic.spared) == (96, 3, 1), "only who has it"
    for prompt in OTHERS[1:]:
        await mine.fetch(prompt)
    assert (traffic.asked, traffic.spared, mine.lost) == (3, 9, 0)


async def test_prompts_that_ask_at_the_same_time_get_one_digest(sides, long_fresh, monkeypatch):
    """The first question brings it, or one after that if the first was broken off."""
    source, mine = sides(kv_blocks=1024), sides(kv_blocks=1024)
    for prompt in OTHERS:
        source.computes(prompt)
    await mine.link_to(source)
    holds, asked, broken = KvConnection.holds, list[bool](), True

    async def counted(connection: KvConnection, *args: Any, digest: bool) -> Any:
        asked.append(digest)
        if broken:
            await until_on_loop(lambda: len(asked) == len(OTHERS))
            raise KvTransferError("broken", "cut")
        return await holds(connection, *args, digest=digest)

    monkeypatch.setattr(KvConnection, "holds", counted)
    await asyncio.gather(*(mine.fetch(prompt) for prompt in OTHERS))
    assert asked.count(True) == 1
    asked.clear()
    broken = False
    await asyncio.gather(*(mine.fetch(prompt) for prompt in OTHERS))
    assert asked.count(True) == 1
    assert [mine.cached(prompt) for prompt in OTHERS] == [96] * len(OTHERS)


async def test_what_is_computed_elsewhere_is_borrowed_once_the_digest_is_old(sides, monkeypatch):
    source, mine = sides(), sides()
    await mine.link_to(source)
    await mine.fetch(PROMPT)
    source.computes(PROMPT)
    monkeypatch.setattr(digests, "FRESH_S", 60.0)
    await mine.fetch(PROMPT)
    assert mine.cached(PROMPT) == 0
    monkeypatch.setattr(digests, "FRESH_S", 0.0)
    await mine.fetch(PROMPT)
    assert mine.cached(PROMPT) == 320


async def test_a_prefix_of_another_tenant_is_not_even_asked_for(sides, long_fresh):
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    await mine.fetch(OTHERS[0])
    seq = mine.seq(PROMPT)
    seq.salt = b"another"
    await mine.stages.prefixes.fetch(seq)
    assert (mine.stages.prefixes.traffic.spared, source.stages.lender.traffic.lent) == (1, 0)
    await mine.fetch(PROMPT)
    assert source.stages.lender.traffic.lent == 1


async def test_engines_with_blocks_of_another_size_or_too_many_are_always_asked(sides, long_fresh, monkeypatch):
    monkeypatch.setattr(lender, "MOST_BLOCKS", 10)
    many, other, mine = sides(), sides(block_size=32), sides()
    many.computes(PROMPT)  # 20 blocks
    other.computes(OTHERS[0])
    await mine.link_to(many, other)
    for prompt in (OTHERS[1], OTHERS[2], OTHERS[0]):
        await mine.fetch(prompt)
    assert (mine.stages.prefixes.traffic.asked, mine.cached(OTHERS[0])) == (6, 96)
    await mine.fetch(PROMPT)
    assert mine.cached(PROMPT) == 320


@pytest.mark.parametrize("size", [3, -4, digests.HASH_BYTES * (digests.MOST_BLOCKS + 1), "4", 4.0, True])
async def test_a_wrong_digest_ends_the_question_and_the_prompt_is_computed(sides, monkeypatch, size):
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    written = lender.write_frame
    monkeypatch.setattr(lender, "write_frame", lambda writer, said: written(writer, {**said, "digest_bytes": size}))
    await mine.fetch(PROMPT)
    assert (mine.cached(PROMPT), mine.stages.prefixes.traffic.tokens) == (0, 0)
    monkeypatch.setattr(lender, "write_frame", written)
    await mine.fetch(PROMPT)
    assert mine.cached(PROMPT) == 320


async def test_an_engine_of_an_older_version_is_asked_each_time(sides, long_fresh, monkeypatch):
    """It answers without a digest."""
    source, mine = sides(), sides()
    await mine.link_to(source)
    named = source.stages.lender._named

    async def older(asked: dict[str, Any], reader: asyncio.StreamReader) -> Seq:
        asked.pop("digest", None)
        return await named(asked, reader)

    monkeypatch.setattr(source.stages.lender, "_named", older)
    await mine.fetch(PROMPT)
    source.computes(PROMPT)
    await mine.fetch(PROMPT)
    assert mine.cached(PROMPT) == 320
