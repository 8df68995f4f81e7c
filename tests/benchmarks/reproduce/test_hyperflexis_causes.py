"""The causes that HyperFlexis' claims give: each where the measured values show it, and not where they do not."""

from dataclasses import replace

import pytest

from benchmarks.reproduce.hyperflexis.causes import ComparedPair, attainment, cost, latency, missed
from benchmarks.reproduce.hyperflexis.setting import CONTENDERS, MODELS, Point, fleet, measure, of_mix
from benchmarks.reproduce.hyperflexis.stages import stages
from benchmarks.reproduce.hyperflexis.work import EngineWork, RoleUse, work_of
from controller.simulator.workloads.mixes import MIXES

UNITS = 20  # of cost in a second of one instance


def work(busy_s=90.0, steps=1000.0, tokens=20_000.0, **changes):
    """Two instances, 50 s, requests in the first 45."""
    roles = {"collocated": RoleUse(busy_s, changes.pop("provisioned_s", 100.0), steps, tokens)}
    return replace(EngineWork(roles, 50.0, 45.0, 2.0, 3.0, 0.2, 0.1), **changes)


def point(attained=0.7, e2e_s=5.0, of=None, by_class=None, **changes):
    of = of or work()
    return Point(attained, 0.0, e2e_s, UNITS * of.provisioned_s, 1.0, by_class or {}, of, **changes)


def pair(own, other):
    return ComparedPair("ours", own, "theirs", other)


def test_no_scheduler_attains_more_than_all():
    told = attainment(pair(point(0.9), point(0.8)), 1.5)
    assert told == "attained there 0.900 and 0.800: 1.5 times as much would be 1.200, more than all"


def test_what_is_left_to_the_other_is_named_only_if_it_is_more_than_the_factor_allows():
    own = point(0.8, by_class={"gsm8k": 0.9, "sharegpt": 0.8, "wikisql": 0.7})
    other = point(0.6, by_class={"gsm8k": 0.1, "sharegpt": 0.7, "wikisql": 1.0})
    told = attainment(pair(own, other), 1.5)
    assert "1.5 times as much would be 0.900, or theirs would have to fall to 0.533. " in told
    assert "What theirs attains of wikisql and sharegpt alone is 0.567, more than that" in told
    assert "alone is" not in attainment(pair(own, other), 1.4)  # 0.571
    assert "By class: gsm8k +80.0, sharegpt +10.0, wikisql -30.0 points" in told


def test_capacity_is_named_with_the_utilisation_and_only_if_requests_take_more_than_there_is():
    assert (work(99.0).load, work(81.0).load) == (pytest.approx(1.1), pytest.approx(0.9))
    over, under = (list(missed(pair(point(of=work(busy)), point()))) for busy in (99.0, 81.0))
    assert over[-1] == (
        "The instances of theirs compute 90.0 % of their time, those of ours 99.0 %; the requests take 1.10 times what "
        "those have while requests come"
    )
    assert under[-1] == "The instances of theirs compute 90.0 % of their time, those of ours 81.0 %"
    assert over[0].startswith(
        "ours misses the TTFT of 20.0 % of the requests and the TPOT alone of 10.0 %; theirs 20.0 %"
    )


def test_the_busiest_role_is_the_capacity_of_a_disaggregated_fleet():
    roles = {"prefill": RoleUse(30.0, 100.0, 500.0, 0.0), "decode": RoleUse(49.0, 50.0, 1000.0, 20_000.0)}
    both = work(roles=roles)
    assert both.load == pytest.approx(0.98 * 50 / 45)
    assert both.decoding == roles["decode"]
    assert (
        "those of ours 30.0 % (prefill), 98.0 % (decode); the requests take 1.09 times"
        in list(missed(pair(point(of=both), point())))[-1]
    )


def test_a_latency_below_that_of_any_scheduler_counts_those_that_answer_as_many():
    own, quick = point(e2e_s=5.0), point(e2e_s=3.0)
    told = latency(pair(own, point(e2e_s=6.0)), 2.5, [own, quick])
    assert "5.00 and 6.00 s; 2.50 s would be needed, less than the 3.00 s of any scheduler" in told
    refuses = replace(quick, answered=0.5)
    assert "less than the 5.00 s" in latency(pair(own, point()), 2.5, [own, refuses])
    assert "any scheduler" not in latency(pair(own, point()), 3.5, [own, quick])


def test_larger_steps_are_a_cause_of_latency_only_if_they_are_larger_and_slower():
    slow = work(steps=800.0, after_s=3.3)  # 25 tokens, 112 ms
    told = latency(pair(point(of=slow), point()), 4.0)
    assert "Until the first token ours takes 2.00 s and theirs 2.00 s, from there to the end 3.30 and 3.00 s" in told
    assert told.endswith("Steps generate more tokens (25.0 and 20.0) and take longer (112.5 and 90.0 ms)")
    for other in (work(steps=1000.0, after_s=3.3), work(steps=800.0, after_s=3.0), work(72.0, 800.0, after_s=3.3)):
        assert "Steps" not in latency(pair(point(of=other), point()), 4.0)


def test_the_time_after_the_first_token_can_be_too_much_alone():
    assert "The time after the first token alone is more than would be needed" in latency(pair(point(), point()), 2.9)
    assert "alone" not in latency(pair(point(), point()), 3.1)


def test_a_longer_wait_is_laid_to_capacity_only_beside_the_utilisation():
    waits = work(99.0, first_s=2.5)
    told = latency(pair(point(of=waits), point()), 4.0)
    assert told.endswith(
        "Requests take 1.10 times the time that the instances have while requests come, and the instances compute "
        "99.0 % of their time"
    )
    for other in (work(81.0, first_s=2.5), work(99.0, first_s=2.0)):
        assert "while requests come" not in latency(pair(point(of=other), point()), 4.0)


def test_cost_is_what_is_computed_and_what_is_idle():
    told = cost(pair(point(), point(of=work(80.0))), 1700)
    assert told.startswith(
        "costs there 2000 and 2000 units; 1700 would be needed. Of these, 1800 and 1600 are computing, 200 and 400 "
        "idle (busy 90.0 % and 80.0 %); the last answer ends 5.0 and 5.0 s after the last request"
    )
    assert (
        "Computing alone costs more than would be needed, for the same tokens: to save idle time is not enough" in told
    )
    assert "Computing alone costs no more than would be needed" in cost(pair(point(), point()), 1900)


def test_tokens_count_as_the_same_only_if_they_are():
    fewer = point(of=work(tokens=15_000.0))
    told = cost(pair(point(), fewer), 1700)
    assert "ours generates 1.33 times as many tokens" in told
    assert "the same tokens" not in told


def test_smaller_steps_are_a_cause_of_cost_only_if_they_compute_more_for_the_same():
    more = work(90.0, steps=1250.0)
    told = cost(pair(point(of=more), point(of=work(80.0, provisioned_s=90.0))), 1700)
    assert "It computes 200 units more, as the same tokens take smaller steps: 16.0 and 20.0 tokens a step" in told
    same = cost(pair(point(of=work(90.0)), point(of=work(80.0, provisioned_s=90.0))), 1700)
    assert "It computes 200 units more" in same
    assert "smaller steps" not in same
    prefill = {"prefill": RoleUse(50.0, 100.0, 500.0, 0.0), "decode": RoleUse(40.0, 100.0, 1250.0, 20_000.0)}
    before = {"prefill": RoleUse(30.0, 100.0, 500.0, 0.0), "decode": RoleUse(38.0, 80.0, 1000.0, 20_000.0)}
    told = cost(pair(point(of=work(roles=prefill)), point(of=work(roles=before))), 1700)
    assert "It computes 440 units more" in told
    assert "smaller steps" not in told  # it computes more, but not in the steps that generate


def test_idle_time_is_a_cause_only_if_there_is_more_of_it():
    grown = point(of=work(provisioned_s=150.0))
    told = cost(pair(grown, point()), 1900)
    assert "It is idle for 1000 units more. Instances in the mean: 3.0 and 2.0" in told
    assert "units more" not in cost(pair(point(), grown), 1900)
    assert "in the mean" not in cost(pair(point(), point()), 1900)


def test_a_point_without_runs_has_figures_and_no_causes():
    bare = Point(0.7, 0.0, 5.0, 100.0, 1.0)
    assert list(missed(pair(bare, bare))) == []
    assert (
        latency(pair(bare, bare), 4.0) == "attained there 0.700 and 0.700, in 5.00 and 5.00 s; 4.00 s would be needed"
    )
    assert cost(pair(bare, bare), 90) == "costs there 100 and 100 units; 90 would be needed"
    assert EngineWork().load == EngineWork().busy == 0.0


def test_runs_that_generate_nothing_have_no_steps_to_compare():
    nothing = point(of=work(0.0, steps=0.0, tokens=0.0))
    for told in (cost(pair(nothing, point()), 1700), cost(pair(point(), nothing), 1700)):
        assert "tokens a step" not in told
    assert "Steps" not in latency(pair(point(of=work(after_s=4.0)), nothing), 4.0)


@pytest.mark.parametrize("settings", [fleet(MODELS["Qwen7B"]), stages(MODELS["Qwen7B"])])
def test_work_is_that_of_the_runs(settings):
    point = measure(settings, CONTENDERS["slackline"], of_mix(MIXES["4-task"], 90.0, 30), (1, 2), keep=True)
    assert work_of(point.results) == point.work
    records = [record for result in point.results for record in result.records]
    assert point.work.tokens == sum(record.output_tokens for record in records) / 2
    assert point.work.provisioned_s == pytest.approx(point.cost / UNITS)
    assert point.work.first_s + point.work.after_s == pytest.approx(point.e2e_s)
    assert point.work.late + point.work.slow == pytest.approx(1 - point.attainment)
    assert 0 < point.work.busy <= 1
    assert point.work.ended_s >= point.work.arrived_s > 0
    two = sum(point.work.instances(role) for role in point.work.roles)
    assert two == pytest.approx(len(settings.instances))
