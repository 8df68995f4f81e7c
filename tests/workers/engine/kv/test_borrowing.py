"""Borrowed prefixes with both engines in one process: what the borrower asks for, and when it does not."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest

from controller.core.steps import ComingPrefix, Lend, Release, Reserve, Seq
from tests.waiting import until_on_loop
from tests.workers.engine.kv.sides import LAYERS, PROMPT, Counted
from workers.engine.kv import digests, lender, prefixes, transfer
from workers.engine.kv.prefixes import MOST_FETCHES
from workers.engine.kv.transfer import KvConnection
from workers.engine.kv.wire import KvTransferError


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


@pytest.mark.parametrize("late", [False, True])
async def test_a_prefix_that_came_whole_is_not_lost_with_what_follows_it(sides, monkeypatch, late):
    """After its last layer only figures follow: they are cut or late."""
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    written = lender.write_frame

    def unless_last(writer: Any, frame: dict[str, Any]) -> None:
        if "lent" not in frame:
            written(writer, frame)
        elif not late:
            writer.close()

    monkeypatch.setattr(lender, "write_frame", unless_last)
    monkeypatch.setattr(transfer, "STALL_S", 1.0)
    seq = mine.seq(PROMPT)
    await mine.stages.prefixes.fetch(seq)
    assert (mine.cached(PROMPT), mine.lost) == (320, 0)
    moved = mine.stages.prefixes.borrowed(seq).moved
    assert (moved.tokens, moved.layers, moved.reason, moved.error) == (320, LAYERS, "", "")
    traffic = mine.stages.prefixes.traffic
    assert (traffic.borrowed, traffic.tokens, traffic.seconds) == (1, 320, moved.seconds)


async def test_of_an_ended_copy_only_the_figures_are_kept(sides):
    """Its prompt and the tokens of its prefix would stay for as long as the answer takes."""
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    seq, (link,) = mine.seq(PROMPT), mine.stages.links.up()
    await mine.stages.prefixes.fetch(seq)
    assert mine.stages.prefixes.borrowed(seq).moved.tokens == 320
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is prefixes._Copy and each.link is link]
    mine.stages.prefixes.forget(seq)
    assert mine.stages.prefixes.borrowed(seq) is None


async def test_a_copy_that_ends_after_its_prompt_leaves_no_figures(sides, monkeypatch):
    source, mine = sides(), sides()
    source.computes(PROMPT)
    await mine.link_to(source)
    counted = Counted(monkeypatch, mine)
    counted.go = asyncio.Event()
    seq = mine.seq(PROMPT)
    fetching = asyncio.ensure_future(mine.stages.prefixes.fetch(seq))
    await until_on_loop(lambda: counted.under_way == 1)
    seq.coming = ComingPrefix(seq, LAYERS)  # all of it is here, so that the copy goes on
    mine.stages.prefixes.forget(seq)
    counted.go.set()
    await fetching
    assert mine.cached(PROMPT) == 320
    assert mine.stages.prefixes.borrowed(seq) is None


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
