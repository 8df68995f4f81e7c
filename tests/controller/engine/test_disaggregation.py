"""KV from another engine: reserved before it comes, decoded without a prefill, kept until it was taken over."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.steps import (
    Aborted,
    Added,
    CacheReset,
    FinishReason,
    Landed,
    Lend,
    PrefixEnded,
    Reject,
    Release,
    Reserve,
    Reserved,
    SeqState,
)
from controller.engine import ProtocolError
from tests.controller.engine.driver import Driver, make_seq


def coming(name, prompt=8, max_tokens=4, **fields):
    """A sequence whose first token another engine sampled."""
    seq = make_seq(name, prompt, max_tokens, **fields)
    seq.output_tokens = 1
    return seq


def answers(driver, event):
    found = driver.scheduler.handle([event], driver.now).actions
    for action in found:
        if not isinstance(action, Reserved):
            driver._take(action)
    driver.scheduler.check()
    return found


def test_what_landed_decodes_without_a_prefill():
    driver = Driver(prefix_caching=False)
    seq = coming("a", 8, max_tokens=4)
    assert answers(driver, Reserve(seq)) == [Reserved(seq)]
    assert (seq.state, len(seq.blocks), driver.step) == (SeqState.ARRIVING, 3, None)
    assert driver.scheduler._in_transit.coming == 1
    driver.send(Landed(seq))
    assert (driver.step.chunks, driver.step.decodes, driver.step.context_sum) == ((), (seq,), 9)
    driver.run()
    assert driver.ended == {"a": FinishReason.LENGTH}
    assert len(driver.outputs["a"]) == 3
    assert driver.scheduler.totals.prompt == 0
    assert driver.scheduler.idle
    assert driver.scheduler.blocks.free == 64


def test_without_room_nothing_is_reserved():
    driver = Driver(kv_blocks=16, max_model_len=64)
    driver.add(make_seq("big", 50, max_tokens=2))
    late = coming("late", 20)
    assert answers(driver, Reserve(late)) == [Reject(late, "no_room")]
    assert late.blocks == []
    driver.run()
    assert answers(driver, Reserve(late)) == [Reserved(late)]


def test_what_can_never_fit_is_too_long():
    driver = Driver(max_model_len=16)
    seq = coming("a", 15)
    assert answers(driver, Reserve(seq)) == [Reject(seq, "too_long")]


def test_a_prefix_that_is_here_need_not_be_sent():
    driver = Driver()
    prompt = list(range(12))
    driver.add(make_seq("first", prompt, max_tokens=1))
    driver.run()
    seq = coming("second", [*prompt, 99], max_tokens=3)
    seq.token_ids.append(7)
    answers(driver, Reserve(seq))
    assert seq.cached == 12
    driver.send(Landed(seq))
    driver.run()
    assert driver.ended["second"] is FinishReason.LENGTH


def test_the_landed_prompt_can_be_shared():
    driver = Driver()
    seq = coming("a", list(range(8)), max_tokens=2)
    seq.token_ids.append(7)
    answers(driver, Reserve(seq))
    driver.send(Landed(seq))
    driver.run()
    follow = make_seq("b", [*range(8), 50, 51], max_tokens=1)
    driver.add(follow)
    assert follow.cached == 8


def test_arrivals_beyond_the_slots_wait_with_their_blocks_and_go_before_the_queue():
    driver = Driver(max_num_seqs=1, prefix_caching=False)
    driver.add(make_seq("running", 4, max_tokens=3))
    driver.add(make_seq("queued", 4, max_tokens=1, arrival=0.5))
    seq = coming("landed", 4, max_tokens=2, arrival=9.0)
    answers(driver, Reserve(seq))
    driver.send(Landed(seq))
    assert driver.scheduler._in_transit.coming == 1
    driver.run()
    assert list(driver.ended) == ["running", "landed", "queued"]


def test_kv_of_an_ended_prefill_stays_until_released():
    driver = Driver(kv_blocks=16, max_model_len=64, prefix_caching=False)
    seq = make_seq("a", 40, max_tokens=1, keep_kv=True)
    driver.add(seq)
    driver.run()
    assert driver.ended == {"a": FinishReason.LENGTH}
    assert driver.scheduler.blocks.free == 6
    assert not driver.scheduler.idle
    driver.add(make_seq("b", 40, max_tokens=1))
    assert driver.step is None  # no room beside what is kept
    driver.send(Release(seq))
    assert driver.step is not None
    driver.send(Release(seq))
    driver.run()
    assert driver.scheduler.blocks.free == 16


@pytest.mark.parametrize("landed", [False, True])
def test_one_that_is_not_wanted_any_more_gives_its_blocks_back(landed):
    driver = Driver(max_num_seqs=1, prefix_caching=False)
    driver.add(make_seq("running", 4, max_tokens=5))
    seq = coming("a", 8)
    answers(driver, Reserve(seq))
    if landed:
        driver.send(Landed(seq))
    driver.send(Aborted(seq))
    assert driver.ended == {"a": FinishReason.ABORT}
    driver.run()
    assert driver.scheduler.blocks.free == 64


def test_kv_no_one_announced_is_an_error():
    driver = Driver()
    with pytest.raises(ProtocolError, match="without a reservation"):
        driver.send(Landed(coming("a")))
    answers(driver, Reserve(coming("b")))
    with pytest.raises(ProtocolError, match="in use"):
        answers(driver, Reserve(coming("b")))
    with pytest.raises(ProtocolError, match="in use"):
        driver.send(Added(make_seq("b")))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(2, 20), st.integers(0, 4), st.booleans()), min_size=1, max_size=14
    ),
    st.integers(12, 30),
    st.integers(1, 4),
)
def test_every_arrival_ends_whatever_the_room(script, blocks, slots):
    """Blocks run out, arrivals are computed again here, own prompts come between: nobody is lost, all blocks return."""
    driver = Driver(kv_blocks=blocks, max_model_len=48, max_num_seqs=slots, prefix_caching=False)
    todo = [
        (make_seq(f"s{i}", prompt, output, arrival=float(i)) if own else coming(f"s{i}", prompt, output), gap, own)
        for i, (prompt, output, gap, own) in enumerate(script)
    ]
    moving = []
    for seq, gap, own in todo:
        for _ in range(gap):
            if driver.step is not None:
                driver.finish_step()
        for known in moving[:]:
            driver.send(Landed(known))
            moving.remove(known)
        if own:
            driver.add(seq)
            continue
        for _ in range(10_000):
            if any(isinstance(a, Reserved) for a in answers(driver, Reserve(seq))):
                break
            assert driver.step is not None, "no room, and nothing runs that could make some"
            driver.finish_step()
        moving.append(seq)
    for known in moving:
        driver.send(Landed(known))
    driver.run()
    assert set(driver.ended) == {seq.id for seq, _, _ in todo}
    assert driver.scheduler.blocks.free == blocks
    assert driver.scheduler.idle


# ---- prefixes of other engines --------------------------------------------------------------------------------------


def borrowed(driver, prompt, tokens):
    """A prefix that another engine lent, of which `tokens` tokens have come."""
    seq = make_seq("borrowed", prompt, max_tokens=1)
    assert answers(driver, Reserve(seq)) == [Reserved(seq)]
    assert answers(driver, PrefixEnded(seq, tokens)) == []
    return seq


@pytest.mark.parametrize(("came", "cached"), [(12, 12), (9, 8), (0, 0)])
def test_a_borrowed_prefix_is_cached_as_far_as_it_came(came, cached):
    driver = Driver()
    borrowed(driver, list(range(12)), came)
    assert driver.scheduler.idle
    assert driver.scheduler.blocks.free == 64
    driver.add(make_seq("mine", [*range(12), 99], max_tokens=2))
    assert (driver.step.chunks[0].start, driver.step.chunks[0].length) == (cached, 13 - cached)
    driver.run()
    assert len(driver.outputs["mine"]) == 2


def test_a_borrowed_prefix_is_not_cached_if_the_cache_was_reset_meanwhile():
    driver = Driver()
    seq = make_seq("borrowed", list(range(12)), max_tokens=1)
    answers(driver, Reserve(seq))
    answers(driver, CacheReset())
    answers(driver, PrefixEnded(seq, 12))
    assert driver.scheduler.uncached(make_seq("mine", list(range(13)), max_tokens=2)) == 13


def test_a_prefix_that_was_not_reserved_cannot_end():
    with pytest.raises(ProtocolError, match="without a reservation"):
        Driver().scheduler.handle([PrefixEnded(make_seq("a", 8), 8)], 0.0)


def test_lent_blocks_stay_until_they_are_released():
    driver = Driver(kv_blocks=16, max_model_len=64)
    driver.add(make_seq("first", list(range(12)), max_tokens=1))
    driver.run()
    lent = make_seq("lent", list(range(13)), max_tokens=1)
    answers(driver, Lend(lent))
    assert (lent.computed, len(lent.blocks)) == (12, 3)
    answers(driver, CacheReset())
    assert driver.scheduler.blocks.free == 13
    answers(driver, Release(lent))
    assert driver.scheduler.blocks.free == 16


def test_nothing_is_lent_to_another_tenant():
    driver = Driver()
    driver.add(make_seq("first", list(range(12)), max_tokens=1, salt=b"one"))
    driver.run()
    lent = make_seq("lent", list(range(13)), max_tokens=1, salt=b"two")
    answers(driver, Lend(lent))
    assert lent.computed == 0
    answers(driver, Release(lent))
