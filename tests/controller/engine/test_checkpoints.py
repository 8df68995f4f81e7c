"""Checkpoints: KV that an ended sequence leaves for branches, which share it and copy the block filled in part."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.errors import ConfigError
from controller.core.steps import Aborted, CacheReset, Paused, Release, Reserve, Reserved, Resumed, Seq, Step
from controller.engine import EngineConfig, EngineScheduler
from controller.policies.batching import BATCHINGS
from tests.controller.engine.driver import Driver, make_seq

PROMPT = list(range(100, 114))  # of 14 tokens: three blocks of four and a half


def ended(driver: Driver, name: str = "step", prompt: list[int] | None = None, **fields) -> Seq:
    """A sequence that has left a checkpoint of its name."""
    seq = make_seq(name, prompt or PROMPT, max_tokens=4, checkpoint=name, **fields)
    driver.add(seq)
    driver.run()
    assert name in driver.ended
    return seq


def branch(origin: Seq, name: str, more: int = 5, **fields) -> Seq:
    """Goes on from all that the origin said."""
    assert origin.token_ids is not None
    fields = {"branch_of": origin.checkpoint, "salt": origin.salt, **fields}
    return make_seq(name, [*origin.token_ids, *range(more)], max_tokens=3, **fields)


def computed(driver: Driver, name: str) -> int:
    """Tokens of prefill that were computed for it."""
    return sum(chunk.length for step in driver.steps for chunk in step.chunks if chunk.seq.id == name)


@pytest.mark.parametrize("caching", [True, False])
def test_eight_branches_compute_only_what_is_their_own(caching):
    driver = Driver(prefix_caching=caching, kv_blocks=128)
    origin = ended(driver)
    assert origin.computed == 17  # the newest token has no KV
    assert len(origin.blocks) == 5
    branches = [branch(origin, f"b{number}") for number in range(8)]
    driver.add(*branches)
    copies = [copy for step in driver.steps for copy in step.copies]
    assert sorted(source for source, _ in copies) == [origin.blocks[4]] * 8, "each has a copy of the last block"
    assert len({target for _, target in copies}) == 8
    assert all(seq.blocks[:4] == origin.blocks[:4] for seq in branches), "and shares the four full ones"
    driver.run()
    assert [computed(driver, seq.id) for seq in branches] == [6] * 8
    assert [seq.cached for seq in branches] == [17] * 8
    driver.send(Release(origin))
    assert driver.scheduler.blocks.usage == 0, "leaked_blocks"
    driver.scheduler.check()


def test_a_branch_is_counted_as_cached_before_it_is_admitted():
    driver = Driver()
    origin = ended(driver)
    driver.scheduler.blocks.forget()  # of the blocks in use no other sequence knows the names
    seq = branch(origin, "b")
    driver.scheduler.checkpoints.join(seq)
    assert driver.scheduler.blocks.cached_tokens(seq) == 17
    assert driver.scheduler.uncached(seq) == 6


def test_a_branch_outlives_its_checkpoint_and_a_checkpoint_its_branches():
    driver = Driver()
    origin = ended(driver)
    first, second = branch(origin, "a"), branch(origin, "b")
    driver.add(first)
    driver.send(Release(origin))
    driver.run()
    assert driver.ended["a"]
    driver.add(second)  # the checkpoint is gone: its full blocks are cached, no block is copied
    driver.run()
    assert (second.cached, computed(driver, "b")) == (20, 3)  # those of its sister, which had the same tokens
    again = ended(driver, "again")
    driver.add(branch(again, "c"))
    driver.send(Aborted(driver.step.chunks[0].seq))
    driver.run()
    driver.scheduler.check()
    driver.send(Release(again))
    assert driver.scheduler.blocks.usage == 0


@pytest.mark.parametrize("changed", [0, 3, 4, 9, 16])
def test_a_branch_that_differs_earlier_shares_what_is_equal(changed):
    driver = Driver(prefix_caching=False)
    origin = ended(driver)
    tokens = [*origin.token_ids, 1, 2]
    tokens[changed] = 999
    seq = make_seq("b", tokens, max_tokens=2, branch_of="step")
    driver.add(seq)
    driver.run()
    assert seq.cached == changed
    assert computed(driver, "b") == len(tokens) - changed


def test_the_same_prompt_again_leaves_one_token_to_compute():
    driver = Driver()
    ended(driver)
    seq = make_seq("b", PROMPT, max_tokens=2, branch_of="step")
    driver.add(seq)
    driver.run()
    assert (seq.cached, computed(driver, "b")) == (13, 1)


def test_a_branch_of_another_salt_or_of_no_checkpoint_is_computed():
    driver = Driver()
    origin = ended(driver, salt=b"acme")
    for name, changed in (("a", {"salt": b"other"}), ("b", {"branch_of": "elsewhere", "salt": b"other"})):
        seq = branch(origin, name, **changed)
        driver.add(seq)
        driver.run()
        assert (seq.origin, seq.cached if name == "a" else 0) == (None, 0)


def test_an_executor_that_cannot_copy_shares_full_blocks_alone():
    driver = Driver(copies_blocks=False, prefix_caching=False)
    origin = ended(driver)
    seq = branch(origin, "b")
    driver.add(seq)
    driver.run()
    assert (seq.cached, computed(driver, "b")) == (16, 7)
    assert not any(step.copies for step in driver.steps)


def test_an_aborted_sequence_leaves_none():
    driver = Driver()
    seq = make_seq("step", PROMPT, max_tokens=9, checkpoint="step")
    driver.add(seq)
    driver.send(Aborted(seq))
    driver.run()
    assert (len(driver.scheduler.checkpoints), driver.scheduler.blocks.usage) == (0, 0)


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_checkpoints_hold_a_bounded_share_and_the_oldest_end_first():
    driver = Driver(kv_blocks=64, pinned_share=0.25)
    kept = [ended(driver, f"s{number}", [number * 50 + each for each in range(14)]) for number in range(5)]
    assert driver.scheduler.checkpoints.held == 15
    assert [bool(seq.blocks) for seq in kept] == [False, False, True, True, True]
    driver.scheduler.check()


def test_one_that_is_larger_than_the_share_is_not_kept():
    driver = Driver(kv_blocks=64, pinned_share=0.05)
    assert not ended(driver).blocks
    assert driver.scheduler.blocks.usage == 0


def test_one_that_is_larger_than_the_share_ends_no_other():
    """Which may be another tenant's."""
    driver = Driver(kv_blocks=64, pinned_share=0.1)
    other = ended(driver, "other", salt=b"other")
    assert not ended(driver, "large", list(range(500, 540)), salt=b"acme").blocks
    assert driver.scheduler.checkpoints.holds(other)
    driver.scheduler.check()


def test_the_same_name_again_replaces_the_checkpoint():
    driver = Driver()
    first, second = ended(driver), None
    second = make_seq("other-id", PROMPT, max_tokens=4, checkpoint="step")
    driver.add(second)
    driver.run()
    assert (bool(first.blocks), bool(second.blocks), len(driver.scheduler.checkpoints)) == (False, True, 1)
    driver.send(Release(first))  # late: nothing happens
    assert len(driver.scheduler.checkpoints) == 1


def test_checkpoints_give_way_before_a_running_sequence_is_evicted():
    driver = Driver(kv_blocks=16, max_model_len=64, pinned_share=1.0)
    ended(driver)
    seq = make_seq("long", list(range(500, 540)), max_tokens=20)
    driver.add(seq)
    driver.run()
    assert (driver.ended["long"], seq.preemptions, len(driver.scheduler.checkpoints)) == ("length", 0, 0)


@pytest.mark.parametrize("needed", [True, False])
def test_checkpoints_give_way_to_kv_that_comes_for_an_answer_and_not_to_a_borrowed_prefix(needed):
    driver = Driver(kv_blocks=16, max_model_len=64, pinned_share=1.0)
    ended(driver)
    free = driver.scheduler.blocks.free * driver.scheduler.config.block_size
    coming = make_seq("coming", list(range(500, 500 + free + 2)), max_tokens=1)
    (answer,) = driver.scheduler.handle([Reserve(coming, needed)], driver.now).actions
    assert isinstance(answer, Reserved) == needed
    assert len(driver.scheduler.checkpoints) == (not needed)


def test_a_prompt_that_needs_all_blocks_is_served():
    driver = Driver(kv_blocks=16, max_model_len=64, pinned_share=1.0)
    ended(driver)
    driver.add(make_seq("whole", list(range(500, 562)), max_tokens=1))
    driver.run()
    assert driver.ended["whole"] == "length"


@pytest.mark.parametrize("event", [CacheReset(), Paused(release_kv=True)])
def test_dropped_kv_takes_its_checkpoints_along(event):
    driver = Driver()
    origin = ended(driver)
    driver.send(event, Resumed())
    assert (len(driver.scheduler.checkpoints), driver.scheduler.blocks.usage) == (0, 0)
    seq = branch(origin, "b")
    driver.add(seq)
    driver.run()
    assert seq.cached == 0


def test_a_scheduler_that_takes_over_ends_them():
    driver = Driver()
    ended(driver)
    former = driver.scheduler
    assert former.idle
    taken = EngineScheduler(former.config, BATCHINGS["chunked_prefill"](), former)
    taken.check()
    assert (len(taken.checkpoints), taken.blocks.usage) == (0, 0)


def test_a_copy_to_a_block_that_was_freed_is_not_made():
    driver = Driver()
    origin = ended(driver)
    blocks = driver.scheduler.blocks
    seq = branch(origin, "b")
    driver.scheduler.checkpoints.join(seq)
    blocks.take_prefix(seq)
    blocks.release(seq)
    assert blocks.take_copies() == ()


def test_the_share_is_checked():
    with pytest.raises(ConfigError, match="pinned_share"):
        EngineConfig(kv_blocks=64, max_model_len=64, pinned_share=1.5)


class Watched(Driver):
    """Fails if a step writes a block that somebody else holds, or copies one to such a block."""

    def _check_step(self, step: Step) -> None:
        super()._check_step(step)
        refs, size = self.scheduler.blocks._refs, self.scheduler.config.block_size
        for chunk in step.chunks:
            first, last = chunk.start // size, (chunk.start + chunk.length - 1) // size
            assert all(refs[block] == 1 for block in chunk.seq.blocks[first : last + 1])
        assert all(refs[seq.blocks[seq.computed // size]] == 1 for seq in step.decodes)
        assert all(refs[target] == 1 for _, target in step.copies)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.booleans(), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=14
    ),
    st.integers(10, 40),
    st.booleans(),
)
def test_no_block_is_lost_or_doubled_whatever_branches(plan, kv_blocks, caching):
    """Answers do not depend on who branches from whom, and after all ends no block is in use."""
    driver = Watched(kv_blocks=kv_blocks, max_model_len=40, pinned_share=0.5, prefix_caching=caching, max_num_seqs=4)
    made: list[Seq] = []
    for number, (length, keeps, of, waits) in enumerate(plan):
        origin = made[-1 - of % len(made)] if made else None
        tokens = list(range(length))
        name = f"s{number}"
        kept = {"checkpoint": name if keeps else "", "branch_of": origin.checkpoint if origin else ""}
        seq = make_seq(name, tokens, max_tokens=3, **kept)
        made.append(seq)
        driver.add(seq)
        for _ in range(waits):
            if driver.step is not None:
                driver.finish_step()
        if waits == 5:
            driver.send(Release(made[0]))
    driver.run()
    assert set(driver.ended) == {seq.id for seq in made}
    for seq in made:
        driver.send(Release(seq))
    assert driver.scheduler.blocks.usage == 0
