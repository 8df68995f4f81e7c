"""KV blocks: every block in one place, prefixes shared exactly when tokens and salt are equal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.steps import Seq
from controller.engine import BlockError, BlockManager
from tests.controller.engine.driver import make_seq

BLOCK = 4


def hold(manager: BlockManager, seq: Seq) -> int:
    """Admit and compute a whole prompt; returns the tokens that the cache gave."""
    cached = manager.take_prefix(seq)
    assert manager.extend(seq, seq.remaining)
    seq.computed = seq.tokens
    manager.seal(seq, cached)
    return cached


def test_equal_prompts_share_their_full_blocks():
    manager = BlockManager(16, BLOCK)
    first, second = make_seq("a", list(range(10))), make_seq("b", list(range(10)))
    assert hold(manager, first) == 0
    assert hold(manager, second) == 8
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    manager.check([first, second])


def test_one_token_is_always_left_to_compute():
    manager = BlockManager(16, BLOCK)
    hold(manager, make_seq("a", list(range(8))))
    assert manager.cached_tokens(make_seq("b", list(range(8)))) == 4


def test_a_different_first_block_hides_equal_later_blocks():
    manager = BlockManager(16, BLOCK)
    hold(manager, make_seq("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert manager.cached_tokens(make_seq("b", [0, 2, 3, 4, 5, 6, 7, 8, 9])) == 0


def test_salts_isolate_prefixes():
    manager = BlockManager(32, BLOCK)
    hold(manager, make_seq("a", list(range(9)), salt=b"tenant-a"))
    assert manager.cached_tokens(make_seq("b", list(range(9)), salt=b"tenant-b")) == 0
    assert manager.cached_tokens(make_seq("c", list(range(9)))) == 0
    assert manager.cached_tokens(make_seq("d", list(range(9)), salt=b"tenant-a")) == 8


def test_given_hashes_work_without_token_ids():
    manager = BlockManager(16, BLOCK)
    hold(manager, make_seq("a", 9, block_hashes=["p", "q"]))
    assert manager.cached_tokens(make_seq("b", 12, block_hashes=["p", "x"])) == 4


def test_a_shared_block_outlives_its_first_owner():
    manager = BlockManager(16, BLOCK)
    first, second = make_seq("a", list(range(9))), make_seq("b", list(range(9)))
    hold(manager, first)
    hold(manager, second)
    manager.release(first)
    manager.check([second])
    assert manager.free == 16 - 3


def test_released_prefixes_stay_until_blocks_are_needed_and_go_oldest_tail_first():
    manager = BlockManager(6, BLOCK)
    old, new = make_seq("old", list(range(12))), make_seq("new", list(range(100, 112)))
    for seq in (old, new):
        hold(manager, seq)
        manager.release(seq)
    assert manager.free == 6
    hold(manager, make_seq("big", 4))  # takes one block: the tail of the older prefix
    assert manager.cached_tokens(make_seq("x", [*range(12), 0])) == 8
    assert manager.cached_tokens(make_seq("y", [*range(100, 112), 0])) == 12


def test_using_a_cached_prefix_makes_it_recent():
    manager = BlockManager(6, BLOCK)
    for name, start in (("old", 0), ("new", 100)):
        seq = make_seq(name, list(range(start, start + 12)))
        hold(manager, seq)
        manager.release(seq)
    touch = make_seq("touch", [*range(12), 0])
    manager.take_prefix(touch)
    manager.release(touch)
    hold(manager, make_seq("big", 12))
    assert manager.cached_tokens(make_seq("x", [*range(12), 0])) == 12
    assert manager.cached_tokens(make_seq("y", [*range(100, 112), 0])) == 0


def test_extend_takes_all_or_nothing():
    manager = BlockManager(2, BLOCK)
    seq = make_seq("a", 4)
    assert manager.extend(seq, 8)
    seq.computed = 8
    assert not manager.extend(seq, 1)
    assert len(seq.blocks) == 2


def test_fits_counts_idle_cached_blocks_once():
    manager = BlockManager(3, BLOCK)
    seq = make_seq("a", list(range(12)))
    hold(manager, seq)
    manager.release(seq)
    assert manager.fits(make_seq("b", list(range(12))))
    assert not manager.fits(make_seq("c", [*range(12), 1]))


def test_forgetting_keeps_what_is_in_use():
    manager = BlockManager(8, BLOCK)
    used, idle = make_seq("used", list(range(9))), make_seq("idle", list(range(50, 59)))
    hold(manager, used)
    hold(manager, idle)
    manager.release(idle)
    manager.forget()
    manager.check([used])
    assert manager.cached_tokens(make_seq("x", list(range(9)))) == 0
    manager.release(used)
    assert manager.free == 8


def test_caching_can_be_off():
    manager = BlockManager(8, BLOCK, prefix_caching=False)
    hold(manager, make_seq("a", list(range(9))))
    assert manager.cached_tokens(make_seq("b", list(range(9)))) == 0


@pytest.mark.parametrize("damage", ["lose", "double", "count", "name"])
def test_check_sees_damage(damage):
    manager = BlockManager(8, BLOCK)
    seq = make_seq("a", list(range(9)))
    hold(manager, seq)
    match damage:
        case "lose":
            manager._empty.pop()
        case "double":
            manager._empty.append(seq.blocks[0])
        case "count":
            manager._refs[seq.blocks[0]] += 1
        case "name":
            manager._hash_of[seq.blocks[0]] = None
    with pytest.raises(BlockError):
        manager.check([seq])


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), prompts, st.sampled_from([b"", b"s"])),
        st.tuples(st.just("grow"), st.integers(0, 30), st.integers(1, 6)),
        st.tuples(st.just("release"), st.integers(0, 30), st.none()),
        st.tuples(st.just("forget"), st.none(), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(operations, st.integers(4, 12))
def test_books_balance_under_any_use_and_hits_are_true(script, total):
    """Whatever is done, every block is in one place, and a shared prefix really has the same tokens and salt."""
    manager, live, content = BlockManager(total, BLOCK), [], {}
    for serial, (kind, what, more) in enumerate(script):
        if kind == "admit":
            _admit(manager, live, content, make_seq(str(serial), what, salt=more))
        elif kind == "forget":
            manager.forget()
        elif live and kind == "grow":
            _grow(manager, live[what % len(live)], content, more)
        elif live:
            manager.release(live.pop(what % len(live)))
        manager.check(live)
    for seq in live:
        manager.release(seq)
    manager.check([])
    assert manager.free == total


def _admit(manager, live, content, seq):
    if not manager.fits(seq):
        return
    cached = manager.take_prefix(seq)
    assert cached < seq.tokens
    for index in range(cached // BLOCK):
        assert content[seq.blocks[index]] == (seq.salt, seq.token_ids[: (index + 1) * BLOCK])
    assert manager.extend(seq, seq.remaining)
    seq.computed = seq.tokens
    _write(seq, content, cached)
    manager.seal(seq, cached)
    live.append(seq)


def _grow(manager, seq, content, tokens):
    before = seq.computed
    if not manager.extend(seq, tokens):
        return
    seq.token_ids.extend([1] * tokens)
    seq.output_tokens += tokens
    seq.computed += tokens
    _write(seq, content, before)
    manager.seal(seq, before)


def _write(seq, content, start):
    for index in range(start // BLOCK, len(seq.blocks)):
        content[seq.blocks[index]] = (seq.salt, seq.token_ids[: (index + 1) * BLOCK])
