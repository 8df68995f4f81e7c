"""Windows of several gateways as one."""

from __future__ import annotations

import pytest

from controller.slo.windows import merged_windows
from tests.console.live.live_data import fleet, window


def test_windows_of_two_gateways_add_up():
    left = window(finished=100, attained=100, ttft_p50_s=0.2, oldest_slack_s=0.5, queued=1)
    right = window(finished=300, attained=200, ttft_p50_s=0.6, oldest_slack_s=-0.5, queued=2, miss_reason="expired")
    (merged,) = merged_windows([fleet(classes=[left]), fleet(gateway="gateway-2", classes=[right])])
    assert (merged["finished"], merged["attained"], merged["queued"]) == (400, 300, 3)
    assert merged["ttft_p50_s"] == pytest.approx(0.5)
    assert (merged["oldest_slack_s"], merged["miss_reason"]) == (-0.5, "expired")


def test_a_quantile_known_to_one_gateway_stays():
    left, right = window(ttft_p95_s=None), window(ttft_p95_s=0.7)
    (merged,) = merged_windows([fleet(classes=[left]), fleet(classes=[right])])
    assert merged["ttft_p95_s"] == 0.7


def test_first_tokens_add_up_and_weigh_the_times_that_are_theirs():
    left = window(finished=100, sampled=100, first_tokens=10, in_one_piece=5, ttft_p50_s=0.2)
    right = window(finished=100, sampled=100, first_tokens=90, in_one_piece=0, ttft_p50_s=0.6)
    (merged,) = merged_windows([fleet(classes=[left]), fleet(classes=[right])])
    assert (merged["sampled"], merged["first_tokens"], merged["in_one_piece"]) == (200, 100, 5)
    assert merged["ttft_p50_s"] == pytest.approx(0.56)


def test_of_a_gateway_that_does_not_tell_first_tokens_the_sum_is_not_known():
    left, right = window(sampled=9, first_tokens=9, in_one_piece=0, ttft_p50_s=0.2), window(ttft_p50_s=0.6)
    for pair in ((left, right), (right, left)):
        (merged,) = merged_windows([fleet(classes=[one]) for one in pair])
        assert "first_tokens" not in merged
        assert merged["ttft_p50_s"] == pytest.approx(0.4), "weighted by requests, as before"


def test_merging_leaves_the_messages_alone():
    message = fleet()
    merged_windows([message, fleet(gateway="gateway-2")])
    assert message["classes"][0]["finished"] == 100


def test_the_cause_is_that_of_the_gateway_with_most_misses():
    few, many = window(attained=99, miss_reason="expired"), window(attained=50, miss_reason="slow_decode")
    (merged,) = merged_windows([fleet(classes=[few]), fleet(classes=[many])])
    assert merged["miss_reason"] == "slow_decode"
