"""Borrowed prefixes with both engines in one process: whether a copy pays, and what one that is late costs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.waiting import until_on_loop
from tests.workers.engine.kv.sides import LAYERS, PROMPT, TOKEN_BYTES, measured, moves
from workers.engine.kv import link_health, prefixes
from workers.engine.kv import links as kv_links
from workers.engine.kv.transfer import KvConnection


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
