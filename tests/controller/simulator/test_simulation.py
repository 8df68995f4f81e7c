from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.errors import ConfigError
from controller.core.types import Outcome, Targets
from controller.dispatch import POLICY_SETS, build_dispatcher
from controller.policies.batching import BATCHINGS
from controller.simulator import Demand, Failure, Simulation, SimulationSettings
from controller.simulator.report.results import FleetSample, InstanceUse, RunResult
from controller.slo.attainment import judge
from tests.controller.simulator.runs import FAST, SMALL, facts, simulate, some_demands, with_batching

PATIENT = Targets(1.0, 0.1, None, 3600.0)


def one(prompt=100, output=5, **fields):
    return Demand("only", 1.0, prompt, output, fields.pop("targets", PATIENT), max_tokens=output, **fields)


def test_one_request_alone_takes_what_the_latency_model_says():
    (record,) = simulate([one()], instances=(SMALL,)).records
    prefill = FAST.prefill_a + 100 * FAST.prefill_b + 100 * 100 * FAST.prefill_c
    decodes = [FAST.decode_a + FAST.decode_c + FAST.decode_b * (101 + i) for i in range(4)]
    assert record.outcome is Outcome.OK
    assert record.queue_s == 0.0
    assert record.ttft_s == pytest.approx(prefill, rel=1e-12)
    assert record.e2e_s == pytest.approx(prefill + sum(decodes), rel=1e-12)
    assert record.tpot_s == pytest.approx(sum(decodes) / 4, rel=1e-9)
    assert len(record.token_times) == record.output_tokens == 5


def test_a_long_prompt_runs_in_chunks_over_its_own_past():
    (record,) = simulate([one(prompt=600, output=1)], instances=(SMALL,)).records
    k = FAST
    chunks = [(0, 256), (256, 256), (512, 88)]
    expected = sum(k.prefill_a + k.prefill_b * n + k.prefill_c * n * (n + 2 * start) for start, n in chunks)
    assert record.ttft_s == pytest.approx(expected, rel=1e-12)


def test_network_time_is_paid_once_each_way():
    near, far = (simulate([one()], instances=(SMALL,), network_s=s).records[0] for s in (0.0, 0.25))
    assert far.ttft_s == pytest.approx(near.ttft_s + 0.5)
    assert far.e2e_s == pytest.approx(near.e2e_s + 0.5)
    assert far.tpot_s == pytest.approx(near.tpot_s)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("batching", list(BATCHINGS))
@pytest.mark.parametrize("policy", ["round_robin", "slackline"])
def test_leaps_change_nothing_to_the_bit(batching, policy):
    demands = some_demands(120, rate=40.0, seed=3)
    instances = (with_batching(batching), with_batching(batching, kv_tokens=640, max_model_len=480))
    leaping = simulate(demands, policy, instances)
    stepping = simulate(demands, policy, instances, leaps=False)
    assert facts(leaping) == facts(stepping)
    assert leaping.samples == stepping.samples
    assert [u._replace(busy_s=0) for u in leaping.instances] == [u._replace(busy_s=0) for u in stepping.instances]
    assert policy != "round_robin" or sum(u.preemptions for u in leaping.instances) > 0
    if getattr(BATCHINGS[batching], "steady", False):
        assert leaping.events < 0.8 * stepping.events


@given(st.integers(0, 10_000), st.sampled_from(list(POLICY_SETS)), st.sampled_from(list(BATCHINGS)), st.booleans())
@settings(max_examples=25, deadline=None)
def test_nothing_is_lost_doubled_or_invented(seed, policy, batching, failing):
    demands = some_demands(40, rate=60.0, seed=seed)
    failures = (Failure(0, 0.3, 0.2), Failure(1, 0.9)) if failing else ()
    result = simulate(demands, policy, (with_batching(batching),) * 2, failures=failures)
    assert sorted(r.id for r in result.records) == sorted(d.id for d in demands)
    wanted = {d.id: d for d in demands}
    for record in result.records:
        assert len(record.token_times) == record.output_tokens
        assert list(record.token_times) == sorted(record.token_times)
        if record.outcome is Outcome.OK:
            assert record.output_tokens == wanted[record.id].output_tokens
            assert record.e2e_s == pytest.approx(record.token_times[-1])
    if not failing:
        assert all(record.outcome in (Outcome.OK, Outcome.REFUSED) for record in result.records)


@pytest.mark.parametrize("policy", list(POLICY_SETS))
def test_the_same_run_twice_is_the_same(policy):
    demands = some_demands(80, rate=50.0, seed=5)
    assert facts(simulate(demands, policy)) == facts(simulate(list(reversed(demands)), policy))


def test_simultaneous_arrivals_are_ordered_by_id_not_by_the_list():
    demands = [Demand(f"r{i}", 0.5, 50, 3, PATIENT, max_tokens=3) for i in range(6)]
    assert facts(simulate(demands, "fcfs_window")) == facts(simulate(demands[::-1], "fcfs_window"))


def test_failure_before_the_first_token_is_retried_and_after_it_cuts():
    demands = [Demand("early", 0.0, 200, 400, PATIENT), Demand("late", 0.5, 900, 2, PATIENT)]
    result = simulate(demands, "round_robin", (SMALL,), failures=(Failure(0, 0.52, 1.0),))
    by_id = {record.id: record for record in result.records}
    assert by_id["early"].outcome is Outcome.CUT
    assert 0 < by_id["early"].output_tokens < 400
    assert by_id["early"].token_times[-1] <= 0.52
    assert (by_id["late"].instance, by_id["late"].attempts) == ("engine-0-1", 2)
    two = simulate(demands, "round_robin", (SMALL, SMALL), failures=(Failure(1, 0.51),))
    late = {record.id: record for record in two.records}["late"]
    assert (late.outcome, late.instance, late.attempts) == (Outcome.OK, "engine-0", 2)


def test_a_replaced_instance_serves_again_under_a_new_id():
    demands = some_demands(40, rate=10.0)
    result = simulate(demands, "round_robin", (SMALL,), failures=(Failure(0, 1.0, 0.5),))
    assert {use.id for use in result.instances} == {"engine-0", "engine-0-1"}
    assert any(record.instance == "engine-0-1" and record.outcome is Outcome.OK for record in result.records)
    first, second = sorted(result.instances, key=lambda use: use.id)
    assert first.provisioned_s == pytest.approx(1.0)
    assert second.provisioned_s == pytest.approx(result.ended_at - 1.5)


def test_clients_that_give_up_are_misses_with_what_they_got():
    demands = [Demand("a", 0.0, 100, 500, PATIENT), *(Demand(f"b{i}", 0.1, 900, 50, PATIENT) for i in range(40))]
    result = simulate(demands, "round_robin", (SMALL,), cutoff_s=1.0)
    assert result.ended_at == pytest.approx(1.1)
    assert {record.outcome for record in result.records} <= {Outcome.CUT, Outcome.EXPIRED, Outcome.OK}
    assert not any(record.attained for record in result.records if record.outcome is not Outcome.OK)
    started = [record for record in result.records if record.outcome is Outcome.CUT]
    assert started
    assert all(record.token_times[-1] <= result.ended_at - record.at + 1e-9 for record in started)


def test_too_long_prompts_are_refused_by_the_engine():
    (record,) = simulate([one(prompt=2000)], "round_robin", (SMALL,)).records
    assert (record.outcome, record.reason) == (Outcome.REFUSED, "too_long")


def test_a_cached_prefix_is_not_computed_again():
    caching = replace(SMALL, prefix_caching=True, block_size=64)
    demands = [Demand(f"r{i}", float(i), 256, 2, PATIENT, prefix=("p", "q", "r", "s")) for i in range(3)]
    first, *others = simulate(demands, "round_robin", (caching,)).records
    assert first.cached_tokens == 0
    assert all(record.cached_tokens == 192 for record in others)  # the last block is computed, to sample from
    assert all(record.ttft_s < first.ttft_s for record in others)


def test_samples_count_everybody():
    result = simulate(some_demands(60, rate=100.0), "fcfs_window", (SMALL,), overrides={"pacing": {"window": 4}})
    assert result.samples[0] == FleetSample(0.0, 0, 0, 0, 1)
    assert max(sample.queued for sample in result.samples) > 10
    assert all(sample.waiting + sample.running <= 4 for sample in result.samples)


def test_two_requests_of_one_id_are_refused():
    with pytest.raises(ConfigError, match="same id"):
        Simulation(SimulationSettings((SMALL,)), build_dispatcher("slackline"), [one(), one()])


def test_no_requests_end_at_once():
    result = simulate([])
    assert (result.records, result.ended_at) == ([], 0.0)


@pytest.mark.parametrize("policy", ["round_robin", "slackline"])
def test_records_are_judged_as_live_ones(policy):
    """The simulator judges token goodput over columns; the gateway token by token."""
    records = simulate(some_demands(150, rate=80.0, seed=9), policy).records
    assert len(records) == 150
    for record in records:
        outlook = judge(
            record.targets,
            record.outcome,
            ttft_s=record.ttft_s,
            tpot_s=record.tpot_s,
            e2e_s=record.e2e_s,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            token_times=record.token_times,
        )
        assert outlook == (
            record.ttft_met,
            record.tpot_met,
            record.deadline_met,
            record.attained,
            record.goodput_tokens,
        )


def test_a_request_refused_in_mid_step_does_not_end_the_step_twice():
    """The engine refuses it at once and goes on with the same step, whose end must count once."""
    fits = Demand("fits", 0.0, 100, 20, PATIENT, max_tokens=20)
    too_long = [Demand(f"long{i}", 0.01 + 0.005 * i, SMALL.max_model_len, 2, PATIENT, max_tokens=2) for i in range(30)]
    result = simulate([fits, *too_long], "round_robin", (SMALL,), overrides={"dispatch": {"refuse_infeasible": False}})
    outcomes = {record.id: record.outcome for record in result.records}
    assert outcomes.pop("fits") is Outcome.OK
    assert set(outcomes.values()) == {Outcome.REFUSED}


def test_an_answer_that_ends_as_its_clients_give_up_sends_no_one_after_it():
    requests = [Demand(name, 1.0, 100, 5, PATIENT) for name in "abc"]
    window = {"pacing": {"window": 1}}
    ends = simulate(requests[:1], "fcfs_window", (SMALL,), window).records[0].e2e_s
    cut = simulate(requests, "fcfs_window", (SMALL,), window, cutoff_s=ends)
    assert sorted((record.id, record.outcome) for record in cut.records) == [
        ("a", Outcome.OK),
        ("b", Outcome.EXPIRED),
        ("c", Outcome.EXPIRED),
    ]


def test_h12_cost_is_provisioned_time_by_price_in_units_of_50_ms():
    use = [InstanceUse(name, seconds, 0.0, 0, 0, 0, 0, 0, 1.0) for name, seconds in (("a", 60.0), ("b", 30.0))]
    assert RunResult("p", instances=use).cost / 0.05 == pytest.approx(1800)
    assert RunResult("p", instances=[use[0]._replace(unit_cost=2.5)]).cost == pytest.approx(150.0)
