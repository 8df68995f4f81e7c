"""Decodes that head a step are taken together; the step must be the one that is composed sequence by sequence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.steps import SeqState
from controller.engine import scheduler
from controller.engine.assembly import NOBODY, lead
from controller.engine.blocks import BlockManager
from controller.policies.batching import BATCHINGS
from controller.policies.batching.base import Grant
from tests.controller.engine.driver import make_seq
from tests.controller.engine.test_leaps import VirtualTime, arrivals


def decoding(name, prompt, output):
    seq = make_seq(name, prompt, 50, output_tokens=output, computed=prompt + output - 1)
    seq.state, seq.scheduled_at = SeqState.RUNNING, 0.0
    return seq


@settings(max_examples=150, deadline=None)
@given(arrivals, st.sampled_from(list(BATCHINGS)), st.integers(10, 24))
def test_steps_are_those_composed_one_by_one(script, batching, kv_blocks):
    together, one_by_one = (VirtualTime(batching, kv_blocks, 1) for _ in range(2))
    together.play(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "lead", lambda grants, blocks: NOBODY)
        one_by_one.play(script)
    assert len(together.ended) == len(script)
    assert together.ended == one_by_one.ended
    assert together.scheduler.totals == one_by_one.scheduler.totals


def test_the_lead_ends_with_the_first_that_is_no_decode_or_finds_no_block():
    blocks = BlockManager(4, 4, prefix_caching=False)
    first, second, third = (decoding(name, 3, 2) for name in "abc")  # the fifth token of each begins a block
    for seq in (first, second, third):
        computed, seq.computed = seq.computed, 0
        assert blocks.extend(seq, 4)
        seq.computed = computed
    grants = [Grant(first, 1), Grant(second, 1), Grant(third, 1)]
    found = lead(grants, blocks)
    assert (found.decodes, found.context) == ([first], 5)
    blocks.release(third)
    third.state = SeqState.WAITING
    assert lead(grants, blocks).decodes == [first, second]
    assert lead([Grant(make_seq("p", 8), 8), *grants], blocks) == ([], 0)
    first.state = SeqState.WAITING
    assert found.still_running() == ([], 0)
