"""Scores count every miss, and unfinished requests never make a mean look better."""

import math

import pytest

from benchmarks.load.generator import LoadRun, RequestTiming
from benchmarks.load.scoring import percentile, score, summary
from benchmarks.load.workloads import FOUR_TASKS

QA = FOUR_TASKS[0]  # TTFT 0.7 s, TPOT 0.5 s


def sample(due: float, ttft: float, tpot: float = 0.1, outcome: str = "ok", tokens: int = 11) -> RequestTiming:
    first = due + ttft
    return RequestTiming(QA.name, due, 30, tokens, due, first, first + tpot * (tokens - 1), tokens, outcome, 200)


def test_both_targets_must_be_met():
    assert sample(0, 0.69).attained(0.7, 0.5)
    assert not sample(0, 0.71).attained(0.7, 0.5)
    assert not sample(0, 0.1, tpot=0.51).attained(0.7, 0.5)
    assert sample(0, 0.1, tokens=1).attained(0.7, 0.0)


@pytest.mark.parametrize("outcome", ["cut", "refused", "failed"])
def test_what_did_not_finish_is_a_miss(outcome):
    assert not sample(0, 0.1, outcome=outcome).attained(0.7, 0.5)


def test_unfinished_requests_count_until_the_cutoff():
    samples = [sample(0.0, 0.2), sample(10.0, 0.2, outcome="cut")]
    scored = score(LoadRun(samples, 0.0, 35.0), [QA], cutoff_s=25.0)
    assert scored.attainment == 0.5
    assert scored.e2e_finished_s == pytest.approx(1.2)
    assert scored.e2e_mean_s == pytest.approx((1.2 + 25.0) / 2)


def test_a_refusal_costs_what_a_cut_request_costs():
    refused = score(LoadRun([sample(0.0, 0.2), sample(1.0, math.nan, outcome="refused")], 0.0, 26.0), [QA])
    cut = score(LoadRun([sample(0.0, 0.2), sample(1.0, math.nan, outcome="cut")], 0.0, 26.0), [QA])
    assert refused.e2e_mean_s == cut.e2e_mean_s
    assert not math.isnan(refused.e2e_mean_s)


def test_summary_is_the_median_with_its_spread():
    runs = [
        LoadRun([sample(i, 0.1 if i < met else 0.9) for i in range(10)], gap, 35.0)
        for met, gap in ((10, 0.1), (4, 0.3), (8, 0.2))
    ]
    found = summary([score(run, [QA]) for run in runs])
    assert found["attainment"] == 0.8
    assert found["attainment_spread"] == [0.4, 1.0]
    assert found["by_class"] == {QA.name: 0.8}
    assert found["outcomes"] == {"ok": 30}
    assert found["largest_gap_s"] == 0.3


def test_an_empty_run_has_no_score():
    with pytest.raises(ValueError, match="without requests"):
        score(LoadRun([], 0.0, 0.0), [QA])


def test_percentiles_are_nearest_rank():
    values = list(range(1, 101))
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
