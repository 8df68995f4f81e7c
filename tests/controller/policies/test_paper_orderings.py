"""FlowPrefill's orderings (worked example F1), least attained service, shortest job first."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.policy import ORDERINGS, Cost
from controller.core.types import Request, Targets
from controller.policies.ordering import learned_rank, least_attained_service, shortest_job_first
from controller.policies.ordering.slack_aware_edf import SlackAwareEdf

F1 = {"A": (10, 3), "B": (4, 5), "C": (20, 1), "D": (8, 9), "E": (2, 2)}


def request(name, due=10.0, **fields):
    return Request(name, 0.0, Targets(due, 0.5), fields.pop("prompt", 100), 10, **fields)


def cost(prefill_s, service_s=1.0):
    return Cost(prefill_s, service_s, 0.02)


def order_of_f1(name, now):
    ordering = ORDERINGS[name]()
    return "".join(sorted(F1, key=lambda n: ordering.rank(request(n, F1[n][0]), cost(F1[n][1]), now).key))


@pytest.mark.parametrize(
    ("name", "now", "expected"),
    [
        ("slack_aware_edf", 0, "EACDB"),
        ("slack_aware_edf", 5, "ACDBE"),
        ("deadline_aware_edf", 5, "DACBE"),
        ("earliest_deadline_first", 0, "EBDAC"),
        ("earliest_deadline_first", 5, "EBDAC"),
    ],
)
def test_f1(name, now, expected):
    assert order_of_f1(name, now) == expected


@given(st.floats(0.1, 1e6), st.floats(0, 100), st.floats(0, 1e6))
def test_a_rank_is_good_until_it_says_and_not_longer(due, needed, now):
    """At `valid_until` the sign has flipped: asked again then, the request is among the late ones, for good."""
    ordering, asked = SlackAwareEdf(), request("x", due)
    rank = ordering.rank(asked, cost(needed), now)
    late = rank.key[0] == 1.0
    assert late == (rank.valid_until is None)
    if not late:
        assert rank.valid_until > now
        again = ordering.rank(asked, cost(needed), rank.valid_until)
        assert again.key[0] == 1.0
        assert again.valid_until is None


def test_slack_zero_counts_as_slack():
    ordering = SlackAwareEdf()
    assert ordering.rank(request("x", 5.0), cost(2.0), 3.0).key[0] == 0.0
    assert ordering.rank(request("x", 5.0), cost(2.0), 3.0000001).key[0] == 1.0


def test_service_is_that_of_the_whole_program():
    ordering = least_attained_service.LeastAttainedService()
    first, second = request("a1", workflow="a", prompt=300), request("b1", workflow="b", prompt=10)
    for each, tokens in ((first, 50), (second, 5)):
        ordering.observe(ev.Arrived(each), 0.0)
        ordering.observe(ev.Finished(each.id, tokens), 1.0)
    ranks = {name: ordering.rank(request(name, workflow=name[0]), cost(0.1), 2.0).key for name in ("a2", "b2", "c1")}
    assert [ranks[name][0] for name in ("a2", "b2", "c1")] == [350.0, 15.0, 0.0]
    assert ordering.rank(request("alone"), cost(0.1), 2.0).key[0] == 0.0


def test_a_failed_attempt_gets_no_service_and_a_retry_still_counts():
    ordering = least_attained_service.LeastAttainedService()
    ordering.observe(ev.Arrived(request("a1", workflow="a")), 0.0)
    ordering.observe(ev.Failed("a1", before_first_token=True), 0.5)
    assert ordering.rank(request("a2", workflow="a"), cost(0.1), 1.0).key[0] == 0.0
    ordering.observe(ev.Finished("a1", 20), 2.0)
    assert ordering.rank(request("a2", workflow="a"), cost(0.1), 2.0).key[0] == 120.0


def test_programs_remembered_are_bounded():
    ordering = least_attained_service.LeastAttainedService(least_attained_service.Config(keep=2))
    for name in "abc":
        ordering.observe(ev.Arrived(request(name, workflow=name)), 0.0)
        ordering.observe(ev.Finished(name, 1), 1.0)
    attained = [ordering.rank(request("x", workflow=name), cost(0.1), 2.0).key[0] for name in "abc"]
    assert attained == [0.0, 101.0, 101.0]


def test_shortest_job_by_service_or_by_prefill():
    by_service = shortest_job_first.ShortestJobFirst()
    by_prefill = shortest_job_first.ShortestJobFirst(shortest_job_first.Config(by="prefill"))
    short_prompt, short_answer = cost(0.1, 5.0), cost(0.9, 1.0)
    assert by_service.rank(request("a"), short_answer, 0).key < by_service.rank(request("b"), short_prompt, 0).key
    assert by_prefill.rank(request("b"), short_prompt, 0).key < by_prefill.rank(request("a"), short_answer, 0).key
    with pytest.raises(ConfigError, match="valid: prefill, service"):
        shortest_job_first.Config(by="luck")


def tau_of(error, count=400):
    """Kendall's tau between true lengths (log-normal, deviation 1) and the order of the policy."""
    ordering = learned_rank.LearnedRank(learned_rank.Config(error=error))
    lengths = np.exp(np.random.default_rng(4).normal(5, 1, count))
    requests = [replace_output(request(f"r{i}"), int(1 + length)) for i, length in enumerate(lengths)]
    keys = np.array([ordering.rank(each, cost(0.1), 1.0).key[1] for each in requests])
    true = np.array([each.output_tokens for each in requests])
    agree = np.sign(keys[:, None] - keys) * np.sign(true[:, None] - true)
    return agree.sum() / (count * (count - 1))


def replace_output(each, tokens):
    return replace(each, output_tokens=tokens)


@pytest.mark.parametrize("error", [0.0, 0.5, 1.0, 3.0])
def test_the_ranking_error_is_what_it_says(error):
    expected = 2 / math.pi * math.asin(1 / math.sqrt(1 + error**2))
    assert tau_of(error) == pytest.approx(expected, abs=0.06)


def test_a_rank_is_fixed_until_the_request_is_promoted():
    ordering = learned_rank.LearnedRank(learned_rank.Config(promote_s=5.0))
    long = replace_output(request("long"), 10_000)
    rank = ordering.rank(long, cost(0.1), 1.0)
    assert rank == ordering.rank(long, cost(9.9), 3.0)
    assert rank.valid_until == 5.0
    promoted = ordering.rank(long, cost(0.1), 5.0)
    assert promoted.valid_until is None
    assert promoted.key < ordering.rank(replace_output(request("short"), 1), cost(0.1), 1.0).key
