"""KV of evicted sequences in host memory: nothing is lost or mixed up, and the cheaper way is taken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.steps import NO_SWAPS, Aborted, CacheReset, Chunk, Paused, Reserve, Resumed, SeqState, Step, Swaps
from controller.engine.kv_costs import KvCosts, MeasuredCosts
from controller.policies.batching import BATCHINGS
from controller.policies.batching.calm import Calm, CalmConfig
from tests.controller.engine.driver import Driver, expected_output, make_seq
from tests.controller.engine.test_scheduler_properties import arrivals, each_ended_once, play

CHEAP = MeasuredCosts(1e-6, 1e-6, {1: 1e-3})
DEAR = MeasuredCosts(1.0, 1.0, {1: 1e-3})


class MemoryDriver(Driver):
    """A driver with memory: each token of each KV block, so that lost, stale or mixed-up KV is found."""

    def __init__(self, batching="chunked_prefill", start=CHEAP, swap_blocks=64, **config):
        super().__init__(batching, swap_blocks=swap_blocks, **config)
        self.scheduler.measure(KvCosts(self.scheduler.config.block_size, start, swaps=swap_blocks > 0))
        size = self.scheduler.config.block_size
        self.cache = [[None] * size for _ in range(self.scheduler.config.kv_blocks)]
        self.host = [[None] * size for _ in range(swap_blocks)]

    def _check_step(self, step):
        super()._check_step(step)
        for source, target in step.swaps.out:
            self.host[target] = list(self.cache[source])
        for source, target in step.copies:
            self.cache[target] = list(self.cache[source])
        for source, target in step.swaps.back:
            self.cache[target] = list(self.host[source])
        for seq, start, length, _ in step.chunks:
            self._compute(seq, start, length)
        for seq in step.decodes:
            self._compute(seq, seq.computed, 1)

    def _compute(self, seq, start, length):
        size = self.scheduler.config.block_size
        for index in range(start, start + length):
            self.cache[seq.blocks[index // size]][index % size] = content(seq, index)
        found = [self.cache[seq.blocks[index // size]][index % size] for index in range(start + length)]
        assert found == [content(seq, index) for index in range(start + length)], seq.id


def content(seq, index):
    return tuple(seq.token_ids[: index + 1])


def tight(**config):
    """Two sequences of which both need more blocks than there are: the later one is evicted."""
    driver = MemoryDriver(kv_blocks=10, max_model_len=40, max_num_batched_tokens=40, **config)
    first, second = make_seq("a", [1] * 16, 20), make_seq("b", [2] * 16, 20, arrival=1.0)
    driver.add(first, second)
    return driver, first, second


def until_evicted(driver, seq):
    while not seq.preemptions:
        driver.finish_step()


def test_an_evicted_sequence_comes_back_without_computing_again():
    driver, first, second = tight()
    until_evicted(driver, second)
    held = driver.scheduler.swaps.tokens(second)
    assert held > 16
    assert driver.scheduler.uncached(second) == second.tokens - held == 1
    driver.run()
    assert sum(step.tokens for step in driver.steps) == 2 * (16 + 19)  # each token once
    assert [driver.outputs[seq.id] for seq in (first, second)] == [expected_output(first), expected_output(second)]
    assert driver.scheduler.swaps.used == 0
    assert driver.scheduler.totals.swaps.choices["swap_cheaper"] == 1
    assert driver.scheduler.totals.swaps.out > 0


def next_turn(seq):
    return make_seq("next", [*seq.token_ids, 7, 7], 2, arrival=9.0)


def test_calm_charges_a_swapped_sequence_its_copy_and_not_its_prompt_again():
    """All but one of its tokens are in host memory, in blocks that take 5 ms each to come back."""
    driver, _, second = tight(start=MeasuredCosts(1e-6, 5e-3, {1: 1.0}))
    until_evicted(driver, second)
    calm = Calm(CalmConfig(token_s=0.02, prefill_s=1.0))
    blocks = -(-second.swapped // 4)
    assert second.swapped == driver.scheduler.swaps.tokens(second) == second.tokens - 1
    left = 20 - second.output_tokens
    (swapped_s,) = calm.standings([second], 0.0).generation_s
    assert swapped_s == pytest.approx(left * 0.02 + blocks * 5e-3, rel=0.05)
    driver.scheduler.swaps.forget(second)
    (recomputed_s,) = calm.standings([second], 0.0).generation_s
    assert recomputed_s == pytest.approx(left * 0.02 + second.tokens * 1.0)
    driver.run()
    assert (second.swapped, second.back_s) == (0, 0.0)


def test_what_came_back_is_cached_for_the_next_turn():
    driver, _, second = tight()
    driver.run()
    assert second.preemptions == 1
    turn = next_turn(second)
    assert driver.scheduler.blocks.cached_tokens(turn) == (second.tokens - 1) // 4 * 4
    driver.add(turn)
    driver.run()
    assert turn.cached == (second.tokens - 1) // 4 * 4
    assert driver.outputs["next"] == expected_output(turn)


@pytest.mark.parametrize("when", ["running", "in host memory", "copied back"])
def test_what_came_back_is_not_cached_if_the_cache_was_reset_since_it_was_computed(when):
    """The weights may be others by then: another request must not get this KV."""
    driver, _, second = tight()
    outdated = 16 // 4  # blocks at least
    while second.computed < 16:
        driver.finish_step()
    if when == "running":
        driver.send(CacheReset())
    until_evicted(driver, second)
    if when == "in host memory":
        driver.send(CacheReset())
    while not driver.step.swaps.back:
        driver.finish_step()
    if when == "copied back":
        driver.send(CacheReset())
    driver.finish_step()
    assert all(index >= outdated for index in driver.scheduler.blocks.named(second))
    driver.run()
    assert driver.outputs["b"] == expected_output(second)
    assert driver.scheduler.blocks.cached_tokens(next_turn(second)) == 0


def test_what_came_back_is_cached_though_its_sequence_is_aborted_meanwhile():
    driver, _, second = tight()
    until_evicted(driver, second)
    while not driver.step.swaps.back:
        driver.finish_step()
    turn = next_turn(second)
    assert driver.scheduler.blocks.cached_tokens(turn) < 16  # not before the step has copied it
    driver.send(Aborted(second))
    driver.finish_step()
    assert driver.scheduler.blocks.cached_tokens(turn) >= 16
    driver.add(turn)
    driver.run()
    assert driver.outputs["next"] == expected_output(turn)


def sharing():
    """Two sequences of equal prompts, the later one evicted: of its five blocks the first four are the other's too."""
    driver = MemoryDriver(
        kv_blocks=7, max_model_len=28, max_num_batched_tokens=40, prefix_caching=True,
        start=MeasuredCosts(1.5e-3, 1e-6, {1: 1e-3}),
    )  # fmt: skip
    first, second = make_seq("a", [1] * 17, 11), make_seq("b", [1] * 17, 11, arrival=1.0)
    driver.add(first)
    driver.finish_step()
    driver.add(second)
    until_evicted(driver, second)
    return driver, first, second


def test_blocks_that_others_hold_too_are_neither_copied_nor_charged():
    driver, first, second = sharing()
    assert driver.scheduler.swaps.last.swap_s == pytest.approx(1.5e-3, rel=0.01)
    assert len(driver.step.swaps.out) == 1
    driver.run()
    assert (driver.scheduler.totals.swaps.out, driver.scheduler.totals.swaps.back) == (1, 1)
    assert [driver.outputs[seq.id] for seq in (first, second)] == [expected_output(first), expected_output(second)]


def test_a_shared_block_is_copied_once_it_gets_other_content():
    """The other one ends, and a third takes all blocks while the evicted one waits."""
    driver, first, second = sharing()
    third = make_seq("third", [9] * 26, 2, arrival=0.5)
    driver.add(third)
    driver.send(Aborted(first))
    while not third.blocks:
        driver.finish_step()
    assert driver.scheduler.swaps.tokens(second) == second.tokens - 1
    assert driver.scheduler.totals.swaps.out == 5
    driver.run()
    assert driver.scheduler.totals.swaps.back == 5
    assert driver.outputs["b"] == expected_output(second)


def test_a_shared_block_that_a_transfer_takes_is_computed_again():
    """It writes at once, before any step can copy."""
    driver, first, second = sharing()
    swaps, blocks = driver.scheduler.swaps, driver.scheduler.blocks
    assert swaps.tokens(second) == second.tokens - 1
    driver.scheduler.blocks.lost(first.blocks[3])
    assert (swaps.tokens(second), swaps.used) == (0, 0)
    driver.run()
    assert driver.outputs["b"] == expected_output(second)
    assert blocks.free == blocks.total


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"start": DEAR}, "recompute_cheaper"), ({"swap_blocks": 2}, "no_room"), ({"start": None}, "not_measured")],
)
def test_it_is_recomputed_if_that_is_cheaper_or_there_is_no_room(config, reason):
    driver, _, second = tight(**config)
    until_evicted(driver, second)
    assert driver.scheduler.swaps.last.reason == reason
    assert not driver.scheduler.swaps.last.swapped
    assert driver.scheduler.swaps.used == 0
    driver.run()
    assert driver.outputs["b"] == expected_output(second)


def test_without_host_memory_nothing_is_weighed():
    driver, _, second = tight(swap_blocks=0)
    until_evicted(driver, second)
    assert driver.scheduler.swaps is None
    driver.run()
    assert all(step.swaps == Swaps() for step in driver.steps)


def test_an_abort_frees_its_host_memory():
    driver, _, second = tight()
    until_evicted(driver, second)
    assert driver.scheduler.swaps.used > 0
    driver.send(Aborted(second))
    assert driver.scheduler.swaps.used == 0
    driver.run()


def test_a_pause_that_releases_kv_drops_what_host_memory_has_too():
    """The weights may be others afterwards."""
    driver, _, second = tight()
    until_evicted(driver, second)
    driver.send(Paused(release_kv=True))
    driver.finish_step()
    assert driver.scheduler.swaps.used == 0
    assert driver.scheduler.swaps.tokens(second) == 0
    driver.send(Resumed())
    driver.run()
    assert driver.outputs["b"] == expected_output(second)


def test_no_transfer_gets_blocks_that_are_still_being_copied_out():
    driver, _, second = tight()
    until_evicted(driver, second)
    leaving = {block for block, _ in driver.step.swaps.out}
    free = driver.scheduler.blocks.free
    arriving = make_seq("c", [3] * (free * 4), 4, arrival=2.0)
    driver.send(Reserve(arriving, needed=False))
    assert arriving.state is SeqState.ARRIVING or not free
    assert leaving.isdisjoint(arriving.blocks)


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(arrivals, min_size=1, max_size=14),
    batching=st.sampled_from(list(BATCHINGS)),
    kv_blocks=st.integers(11, 24),
    budget=st.integers(4, 20),
    swap_blocks=st.integers(1, 24),
    caching=st.booleans(),
)
def test_no_kv_is_lost_or_mixed_up(script, batching, kv_blocks, budget, swap_blocks, caching):
    driver = MemoryDriver(
        batching,
        kv_blocks=kv_blocks,
        swap_blocks=swap_blocks,
        max_model_len=44,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        prefix_caching=caching,
    )
    seqs, aborts = play(driver, script)
    driver.run()
    each_ended_once(driver, seqs, aborts)
    assert driver.scheduler.swaps.used == 0


# ---- costs ----------------------------------------------------------------------------------------------------------


def ran(chunks=(), decodes=(), swaps=NO_SWAPS):
    found = tuple(Chunk(make_seq("s", 4096), start, length, False) for start, length in chunks)
    return Step(1, found, decodes, 0, (), swaps)


def test_costs_are_learned_from_steps():
    costs = KvCosts(16, MeasuredCosts(1e-3, 1e-3, {64: 1e-4}), swaps=True)
    for _ in range(60):
        costs.observe(ran([(0, 128)], swaps=Swaps(((1, 1), (2, 2)), ((3, 3),))), 0.1 + 0.01 + 0.02, 0.01, 0.02)
    assert costs.swap_s(10) == pytest.approx(10 * (0.005 + 0.02), rel=0.01)
    assert costs.swap_s(10, both=False) == pytest.approx(10 * 0.005, rel=0.01)
    assert costs.recompute_s(128) == pytest.approx(0.1, rel=0.01)
    assert costs.stall_s(128) == pytest.approx(min(8 * 0.025, 0.1), rel=0.01)


def test_a_prompt_beside_decodes_is_charged_what_it_adds():
    costs, seq = KvCosts(16), make_seq("d")
    costs.observe(ran([(0, 100)], (seq,)), 0.5)
    assert costs.recompute_s(100) is None  # how long the decodes alone take is not known
    for _ in range(60):
        costs.observe(ran(decodes=(seq,)), 0.02)
        costs.observe(ran([(0, 100)], (seq,)), 0.03)
    assert costs.recompute_s(100) == pytest.approx(0.01, rel=0.05)


def test_later_tokens_of_a_prompt_are_dearer():
    costs = KvCosts(16, MeasuredCosts(prefill_s={32: 1e-4, 1500: 1e-3}))
    assert costs.recompute_s(64) == pytest.approx(64e-4)
    assert 1000e-4 < costs.recompute_s(2048) < 2048e-3


def test_a_dear_estimate_of_copies_is_given_up_in_time():
    costs = KvCosts(16, MeasuredCosts(1e-3, 1e-3, {64: 1e-4}), swaps=True)
    costs.observe(ran([(0, 64)], swaps=Swaps(((1, 1),), ((2, 2),))), 3.0, 1.0, 1.0)
    assert costs.swap_s(1) > 0.3
    for _ in range(400):
        costs.copies_looked_dearer()
    assert costs.swap_s(1) == pytest.approx(2e-3, rel=0.1)


def test_calm_weighs_what_the_engine_measured():
    policy = Calm()
    driver = Driver(policy)
    costs = KvCosts(4, MeasuredCosts(0.5, 0.25, {1: 1.0}), swaps=True)
    before = policy.preemption.loss(8, 100.0)
    driver.scheduler.measure(costs)
    assert policy.preemption.loss(8, 100.0) == pytest.approx(2 * 0.75 * 100.0) != before
    without = KvCosts(4, MeasuredCosts(0.5, 0.25, {1: 1.0}))
    driver.scheduler.measure(without)
    assert policy.preemption.loss(8, 100.0) == pytest.approx(8 * 1.0 * 100.0)
