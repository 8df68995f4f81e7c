import random

import pytest

from controller.core.errors import ConfigError
from controller.core.policy import Cost, Supply
from controller.core.types import Request, Targets
from controller.policies.ordering.feasible_deadlines import Config, FeasibleDeadlines

PREFILL_ONLY = Supply(1.0, 0.0, 0.0, 0, 0.0, 0.0)  # one instance, whose decodes run elsewhere
EXACT = FeasibleDeadlines(Config(trust=1.0, margin_s=0.0))


def waiting(*jobs):
    """(prefill seconds, TTFT target, value) each, in order of the latest start."""
    found = [
        (Request(f"r{i}", 0.0, Targets(ttft, 0.5), 100, 10, value=value), Cost(prefill, prefill, 0.01))
        for i, (prefill, ttft, value) in enumerate(jobs)
    ]
    return sorted(found, key=lambda each: EXACT.rank(*each, 0.0).key)


def test_nothing_is_deferred_while_all_can_be_in_time():
    assert EXACT.defer(waiting((1, 1, 1), (1, 2, 1), (1, 3, 1)), PREFILL_ONLY, 0.0) == set()


def test_the_request_with_the_most_work_is_deferred_first():
    """Three of four can be in time, whatever is done; without the long one they are."""
    assert EXACT.defer(waiting((3, 3.5, 1), (1, 2, 1), (1, 4, 1), (1, 4.2, 1)), PREFILL_ONLY, 0.0) == {"r0"}


def test_a_value_outweighs_work():
    assert EXACT.defer(waiting((3, 3.5, 9), (1, 3.6, 1)), PREFILL_ONLY, 0.0) == {"r1"}


def test_work_that_was_sent_and_slots_that_are_taken_delay_everyone():
    jobs = waiting((1, 1.5, 1), (1.1, 2.6, 1))
    assert EXACT.defer(jobs, PREFILL_ONLY._replace(backlog_s=1.0), 0.0) == {"r0"}
    full = Supply(10.0, 5.0, 0.0, 0, 0.1, 0.0)  # about 20 tokens of a slot each, half of them prefill
    assert EXACT.defer(jobs, full, 0.0) == {"r1"}
    assert EXACT.defer(jobs, full._replace(free_slots=2), 0.0) == set()


def test_an_instance_that_is_starting_keeps_what_it_can_begin_in_time():
    """The last must begin within three seconds, after four seconds of work: one instance cannot do that, two can."""
    jobs = waiting((1, 2.4, 1), (1, 2.9, 1), (1, 4, 1), (2, 4.4, 1))
    assert EXACT.defer(jobs, PREFILL_ONLY, 0.0) == {"r3"}
    assert EXACT.defer(jobs, PREFILL_ONLY._replace(coming=(1.0,)), 0.0) == set()
    assert EXACT.defer(jobs, PREFILL_ONLY._replace(coming=(1.9, 1.9)), 0.0) == set()
    assert EXACT.defer(jobs, PREFILL_ONLY._replace(coming=(3.1,)), 0.0) == {"r3"}, "too late for any of them"
    blind = FeasibleDeadlines(Config(trust=1.0, margin_s=0.0, coming=False))
    assert blind.defer(jobs, PREFILL_ONLY._replace(coming=(1.0,)), 0.0) == {"r3"}


def test_one_that_is_starting_brings_slots():
    jobs = waiting((1, 1.5, 1), (1.1, 2.6, 1))
    full = Supply(10.0, 5.0, 0.0, 0, 0.1, 0.0, instances=1, slots=2)
    assert EXACT.defer(jobs, full._replace(coming=(0.4,)), 0.0) == set()
    assert EXACT.defer(jobs, full._replace(coming=(1.4,)), 0.0) == set()
    assert EXACT.defer(jobs, full._replace(coming=(1.6,)), 0.0) == {"r1"}


class Counted(tuple):
    """Counts how often somebody goes through it."""

    reads = 0

    def __iter__(self):
        Counted.reads += 1
        return super().__iter__()


def test_each_request_of_a_plan_does_not_go_through_all_that_are_starting():
    """Otherwise a plan takes twice as long with ten of them (76 and 166 ms at 10,000 waiting)."""
    jobs = waiting(*((1.0, 1.0 + place, 1) for place in range(50)))
    reads = []
    for count in (5, 50):
        Counted.reads = 0
        EXACT.defer(jobs[:count], PREFILL_ONLY._replace(coming=Counted((1.0, 2.0, 3.0))), 0.0)
        reads.append(Counted.reads)
    assert reads[0] == reads[1]


def begins_in_s(supply, mean, prefill_s, tokens):
    """When so much work has begun, one instance that is starting after the other."""
    prefilled = done_in_s(supply, prefill_s + supply.backlog_s, supply.prefill_rate, 0.0)
    at_once = mean * supply.slots / supply.instances
    return max(prefilled, done_in_s(supply, tokens - supply.free_slots * mean, supply.token_rate, at_once))


def done_in_s(supply, work, rate, at_once):
    since, of_one = 0.0, rate / supply.instances
    for at in supply.coming:
        if work <= rate * (at - since):
            break
        work, since, rate = max(0.0, work - rate * (at - since) - at_once), at, rate + of_one
    return since + work / rate


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_begins_each_request_when_the_work_before_it_has_begun(seed):
    """Each request alone, in the order of deadlines, against the time that is computed step by step."""
    rng = random.Random(seed)
    coming = tuple(sorted(round(rng.uniform(0.5, 9), 1) for _ in range(rng.randrange(6))))
    rates = (rng.uniform(0.2, 3), rng.uniform(5, 200), rng.uniform(0, 3), rng.randrange(3), 0.05, 0.0)
    supply = Supply(*rates, instances=rng.randint(1, 3), slots=rng.randrange(8), coming=coming)
    jobs = waiting(*((rng.uniform(0.05, 1), rng.uniform(0.3, 15), rng.uniform(0.5, 2)) for _ in range(60)))
    works = {r.id: (cost.prefill_s, r.output_tokens + cost.prefill_s / supply.step_s) for r, cost in jobs}
    mean = sum(tokens for _, tokens in works.values()) / len(works)
    expected, plan = set(), []
    for request, cost in jobs:
        plan.append(request)
        latest_s = request.due - cost.prefill_s - cost.first_byte_s
        while plan:
            before = [works[each.id] for each in plan if each is not request]
            if begins_in_s(supply, mean, sum(a for a, _ in before), sum(b for _, b in before)) <= latest_s:
                break
            share = {e.id: works[e.id][0] / rates[0] + works[e.id][1] / rates[1] for e in plan}
            most = min(plan, key=lambda each: (-share[each.id] / each.value, each.id))
            plan.remove(most)
            expected.add(most.id)
            if most is request:
                break
    assert EXACT.defer(jobs, supply, 0.0) == expected
    assert 0 < len(expected) < len(jobs)


def test_deferred_requests_come_behind_all_others():
    request, cost = waiting((1, 1, 1))[0]
    late, _ = waiting((1, 900, 1))[0]
    assert EXACT.rank(late, cost, 0.0).key < EXACT.rank_deferred(request, cost, 0.0).key


@pytest.mark.parametrize(("field", "value"), [("trust", 0.0), ("margin_s", -1.0), ("lookahead_s", 0.0)])
def test_settings_are_checked(field, value):
    with pytest.raises(ConfigError) as caught:
        Config(**{field: value})
    assert caught.value.field == field
