"""However ranks are scheduled, whoever wants to stop: all stop at the same boundaries, and none waits forever."""

import os
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.torch.rank_counter import RankCounter, shared_memory

SUMS = (2, 4)  # operators of a layer of five that end in a sum: o_proj, down_proj


class Rank:
    """Runs steps of `lengths` operators one after the other; stopped, it goes on at once, as all do."""

    def __init__(self, counter, lengths, chances):
        self.counter, self.lengths, self.chances = counter, list(lengths), chances
        self.entered = 0  # operators begun, of all steps
        self.step = self.done = 0
        self.wants = False
        self.stops = []
        self.stopped_in, self.wanted_in = set(), set()  # steps

    @property
    def over(self):
        return self.step == len(self.lengths)

    def move(self, others, rng):
        """An operator begins, or ends if it can: a sum ends when all have entered it. False: it waits."""
        if self.entered == self.counter.here:
            self.entered += 1
            return True
        if (self.done % 5) in SUMS and any(other.entered < self.entered for other in others):
            return False
        self.done += 1
        over = self.done == self.lengths[self.step]
        self.wants = self.wants or rng.random() < self.chances
        stopped = self.counter.stops(self.wants, over)
        if self.wants:
            self.wanted_in.add(self.step)
        if over:
            self.step, self.done, self.wants = self.step + 1, 0, False
        elif stopped:
            self.stops.append(self.counter.here)
            self.stopped_in.add(self.step)
            self.wants = False
        return True


def run(lengths, world, chances, seed):
    rng, memory = random.Random(seed), shared_memory(world)
    ranks = [Rank(RankCounter(memory, rank, world), lengths, chances[rank]) for rank in range(world)]
    while not all(rank.over for rank in ranks):
        ready = [rank for rank in ranks if not rank.over]
        rng.shuffle(ready)
        assert any(rank.move([other for other in ranks if other is not rank], rng) for rank in ready), "they all wait"
    os.close(memory)
    assert ranks[0].stopped_in <= set().union(*(rank.wanted_in for rank in ranks)), "stopped, and nobody wanted it"
    return [rank.stops for rank in ranks]


@settings(deadline=None, max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 22), min_size=1, max_size=8),
    chances=st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), min_size=2, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_all_stop_at_the_same_boundaries(lengths, chances, seed):
    first, *others = run(lengths, len(chances), chances, seed)
    assert all(stops == first for stops in others)
    if not any(chances):
        assert first == []


def test_a_wish_is_answered_within_what_lies_between_two_sums():
    """A rank is at most a sum behind, and at most one ahead: no stop is more than the two sums' operators away."""
    stops = run([500], 2, [1.0, 0.0], 3)[0]
    assert len(stops) > 150
    assert max(b - a for a, b in pairwise([0, *stops])) <= 6
    assert {stop % 5 for stop in stops} == {0, 1, 2, 3, 4}, "at every operator, not behind the sums alone"


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_place_is_where_the_furthest_goes(ahead):
    memory = shared_memory(2)
    one, two = (RankCounter(memory, rank, 2) for rank in range(2))
    assert [two.stops(False, False) for _ in range(ahead)] == [False] * ahead
    goes_to = ahead + 1 if ahead else 1
    assert [one.stops(True, False) for _ in range(goes_to)] == [False] * (goes_to - 1) + [True]
    assert two.stops(False, False)
    os.close(memory)


def test_a_wish_at_the_end_of_a_step_stops_no_later_one():
    memory = shared_memory(2)
    one, two = (RankCounter(memory, rank, 2) for rank in range(2))
    two.stops(False, True)
    one.stops(True, True)
    assert [two.stops(False, False), one.stops(False, False)] == [False, False]
    os.close(memory)
