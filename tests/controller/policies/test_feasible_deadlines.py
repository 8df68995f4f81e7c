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


def test_deferred_requests_come_behind_all_others():
    request, cost = waiting((1, 1, 1))[0]
    late, _ = waiting((1, 900, 1))[0]
    assert EXACT.rank(late, cost, 0.0).key < EXACT.rank_deferred(request, cost, 0.0).key


@pytest.mark.parametrize(("field", "value"), [("trust", 0.0), ("margin_s", -1.0), ("lookahead_s", 0.0)])
def test_settings_are_checked(field, value):
    with pytest.raises(ConfigError) as caught:
        Config(**{field: value})
    assert caught.value.field == field
