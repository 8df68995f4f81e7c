"""Engine orders with preemption: who runs, who gives way, who is saved from starving."""

from itertools import pairwise

import pytest

from controller.core.errors import ConfigError
from controller.core.estimates import Estimate
from controller.core.steps import Added, Chunk, Seq, Step, StepRan
from controller.policies.batching.earliest_deadline_first import EarliestDeadlineFirstBatching
from controller.policies.batching.learned_rank import LearnedRankBatching, LearnedRankConfig
from controller.policies.batching.least_attained_service import LeastAttainedConfig, LeastAttainedServiceBatching
from controller.policies.batching.ranked import RankConfig
from controller.policies.batching.shortest_job_first import ShortestJobFirstBatching
from controller.predict.foresight import KnownLength
from tests.controller.policies.batching.view import FakeView


def seq(name, tokens=50, due=100.0, program="", arrival=0.0, known=None):
    estimate = Estimate(KnownLength(known or tokens), 1.0, due=due, program=program)
    return Seq(name, arrival, 10, tokens, due=due, estimate=estimate)


def add(policy, *seqs):
    for each in seqs:
        policy.observe(Added(each), 0.0)


def ran(policy, *seqs, times=1):
    """They ran so often, and hold their KV."""
    for each in seqs:
        each.computed, each.output_tokens = (
            each.prompt_tokens + each.output_tokens + times - 1,
            each.output_tokens + times,
        )
        each.computed = each.tokens - 1
    policy.observe(StepRan(Step(1, tuple(Chunk(each, 0, 10, True) for each in seqs), (), 0), times, 0.01), 0.0)


def names(policy, running, waiting, **view):
    return {grant.seq.id for grant in policy.compose(FakeView(running, waiting, token_budget=500, **view), 0.0)}


def test_the_shortest_takes_the_slot_of_the_longest_at_once():
    policy = ShortestJobFirstBatching(RankConfig(slots=2))
    a, b, c = seq("a", 30), seq("b", 80), seq("c", 40)
    add(policy, a, b)
    ran(policy, a, b)
    add(policy, c)
    assert names(policy, [a, b], [c]) == {"a", "c"}
    patient = ShortestJobFirstBatching(RankConfig(slots=2, preempt=False))
    add(patient, a, b)
    ran(patient, a, b)
    add(patient, c)
    assert names(patient, [a, b], [c]) == {"a", "b"}


def test_the_analysers_bound_ranks_and_not_the_truth():
    policy = ShortestJobFirstBatching(RankConfig(slots=1))
    a, b = seq("a", 30, known=90), seq("b", 80, known=20)
    add(policy, a, b)
    assert names(policy, [], [a, b]) == {"b"}


def test_deadlines_rank_by_the_stage():
    policy = EarliestDeadlineFirstBatching(RankConfig(slots=1))
    a, b = seq("a", due=9.0), seq("b", due=4.0)
    add(policy, a, b)
    assert names(policy, [], [a, b]) == {"b"}


def test_who_gives_its_blocks_back_first_is_the_last_in_rank():
    policy = ShortestJobFirstBatching(RankConfig(slots=1))
    a, b, c = seq("a", 30), seq("b", 80), seq("c", 40)
    add(policy, a, b, c)
    assert policy.spare([a, b, c], {a}) is b
    assert policy.spare([a], {a}) is None


def test_a_program_sinks_by_what_all_of_its_calls_received():
    policy = LeastAttainedServiceBatching(LeastAttainedConfig(slots=1, quantum_steps=10))
    first, rival = seq("p/0", program="p"), seq("q/0", program="q", arrival=1.0)
    add(policy, first)
    ran(policy, first, times=25)
    first.finish = "stop"
    ran(policy, first)
    second = seq("p/1", program="p", arrival=0.5)
    add(policy, second, rival)
    assert policy.key(second) == (2.0,)  # 26 steps: past 10 and 20
    assert policy.key(rival) == (0.0,)
    assert names(policy, [], [second, rival]) == {"q/0"}


def test_a_call_sinks_while_it_runs_and_the_leap_ends_there():
    policy = LeastAttainedServiceBatching(LeastAttainedConfig(slots=1, quantum_steps=10))
    a, b = seq("a"), seq("b", arrival=1.0)
    add(policy, a, b)
    ran(policy, a, times=4)
    assert names(policy, [a], [b]) == {"a"}
    assert policy.stays() == 6
    ran(policy, a, times=6)
    assert names(policy, [a], [b]) == {"b"}


def test_waiting_in_proportion_to_service_brings_a_program_back():
    policy = LeastAttainedServiceBatching(LeastAttainedConfig(slots=1, quantum_steps=4, starvation=2.0))
    a, b = seq("a"), seq("b", tokens=500, arrival=1.0)
    add(policy, a)
    ran(policy, a, times=9)  # level 2
    add(policy, b)
    ran(policy, b, times=3)
    assert policy.key(a) == (2.0,)
    ran(policy, b, times=1)
    ran(policy, b, times=20)
    assert policy.key(a) == (0.0,)
    assert names(policy, [a, b], []) == {"a"}


def test_ltr_saves_the_starving_for_a_quantum():
    policy = LearnedRankBatching(LearnedRankConfig(slots=1, error=0.0, promote_steps=20, quantum_steps=5))
    short, long = seq("s", 100), seq("l", 400)
    add(policy, short, long)
    assert names(policy, [], [short, long]) == {"s"}
    ran(policy, short)  # who comes waits from the end of the step that runs
    ran(policy, short, times=15)
    assert names(policy, [short], [long]) == {"s"}
    assert policy.stays() == 5
    ran(policy, short, times=5)
    assert names(policy, [short], [long]) == {"l"}
    ran(policy, long, times=5)
    assert names(policy, [short, long], []) == {"s"}


def test_ltr_errs_as_told():
    perfect, noisy = (LearnedRankBatching(LearnedRankConfig(error=error)) for error in (0.0, 1.0))
    seqs = [seq(f"r{n}", n + 1) for n in range(300)]
    assert sorted(seqs, key=perfect.key) == seqs
    swapped = sum(noisy.key(a) > noisy.key(b) for a, b in pairwise(seqs))
    assert 60 < swapped < 240
    assert [noisy.key(each) for each in seqs] == [noisy.key(each) for each in seqs]


def test_nothing_is_remembered_of_what_has_gone():
    policies = [LearnedRankBatching(), LeastAttainedServiceBatching(), ShortestJobFirstBatching()]
    for policy in policies:
        a = seq("a")
        add(policy, a)
        ran(policy, a)
        a.finish = "stop"
        ran(policy, a)
        assert not policy._entries
        assert not policy._queue
        assert not policy._since
    assert not policies[0]._scores
    assert not policies[1]._own
    assert not policies[1]._programs


@pytest.mark.parametrize(
    ("config", "bad"),
    [
        (LearnedRankConfig, {"error": -1.0}),
        (LearnedRankConfig, {"promote_steps": 0}),
        (LeastAttainedConfig, {"quantum_steps": 0}),
        (LeastAttainedConfig, {"starvation": 0.0}),
    ],
)
def test_bad_settings_are_refused(config, bad):
    with pytest.raises(ConfigError) as caught:
        config(**bad)
    assert caught.value.field == next(iter(bad))
