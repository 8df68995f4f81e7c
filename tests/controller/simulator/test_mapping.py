"""Priorities instead of targets: the mapping that serves, in virtual time (HyperFlexis Alg. 2)."""

import statistics
from dataclasses import replace

import pytest

from controller.core.types import Outcome
from controller.simulator.mapping import around
from controller.simulator.workloads.mixes import FOUR_TASKS, demands
from tests.controller.simulator.runs import SMALL, facts, simulate

ROOMY = replace(SMALL, kv_tokens=16_384, max_model_len=4096)
TABLE = [(task.targets.ttft_s, task.targets.tpot_s) for task in FOUR_TASKS]


def run(rate, policy="slackline", mapping=None, per_task=60, **settings):
    requests = demands(FOUR_TASKS, rate, 3, per_task=per_task)
    return simulate(requests, policy, (ROOMY, ROOMY), mapping=mapping, **settings)


def test_levels_lie_within_the_spread_of_their_targets():
    config = around([(1.0, 0.4), (2.0, 0.8)], 0.25)
    first, second = config.levels
    assert (first.ttft_s, first.ttft_min_s, first.ttft_max_s) == (1.0, 0.75, 1.25)
    assert (second.tpot_s, second.tpot_min_s, second.tpot_max_s) == pytest.approx((0.8, 0.6, 1.0))


def test_without_history_the_configured_target_applies_and_never_the_requests_own():
    result = run(40.0, mapping=around([(0.5, 0.3)] * 4))
    first = min(result.records, key=lambda record: record.at)
    assert (first.targets.ttft_s, first.targets.tpot_s) == (0.5, 0.3)
    assert all(record.targets.ttft_s <= 0.5 * 1.25 for record in result.records)


def test_assigned_targets_stay_in_their_range_and_tighten_when_there_is_room():
    mapping = around(TABLE)
    result = run(4.0, mapping=mapping)
    for record in result.records:
        level = [task.name for task in FOUR_TASKS].index(record.slo_class)
        assert record.targets.ttft_s <= mapping.levels[level].ttft_max_s
    late = [r.targets.ttft_s for r in result.records if r.slo_class == "wikisql"][-20:]
    assert statistics.median(late) < 20.0 * 0.75, "no higher priority pending: below the strict lower bound"


def test_contention_holds_the_strict_lower_bound():
    calm, crowded = run(4.0, mapping=around(TABLE)), run(500.0, mapping=around(TABLE))

    def lowest(result):
        return min(r.targets.ttft_s for r in result.records if r.slo_class == "wikisql" and r.at > 0.05)

    assert lowest(crowded) > lowest(calm)


def test_requests_are_judged_by_what_they_were_assigned():
    result = run(60.0, "round_robin", around([(0.02, 0.001)] * 4, 0.0))
    assert all(record.outcome is Outcome.OK for record in result.records)
    assert {record.tpot_met for record in result.records if record.output_tokens > 1} == {False}


def test_the_same_run_twice_is_the_same_and_no_mapping_changes_nothing():
    assert facts(run(40.0, mapping=around(TABLE))) == facts(run(40.0, mapping=around(TABLE)))
    assert {r.targets.ttft_s for r in run(40.0).records} == {0.7, 1.0, 2.0, 20.0}
