"""Decode engines that compute the first token in a slot, as vLLM and SGLang, and say nothing of a request before."""

from dataclasses import replace

import pytest

from benchmarks.bench_fleets import _no_files, run_policy
from benchmarks.fleets.cells import cells
from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients, Outcome, Targets
from controller.dispatch import build_dispatcher
from controller.simulator import Demand, Failure, InstanceSettings, LinkSettings, Simulation, SimulationSettings
from controller.simulator.experiment import parse_experiment
from tests.controller.simulator.runs import facts, simulate

A100 = LatencyCoefficients(0.0066, 5.54e-5, 1.52e-9, 0.0115, 8.2e-8, 3.66e-5)  # Llama-3.1-8B
PREFILL = InstanceSettings(A100, max_num_seqs=64, role="prefill", max_model_len=16_384)
WITH_KV = replace(PREFILL, role="decode")
IN_A_SLOT = replace(WITH_KV, first_token_with_kv=False)


def demand(name, at, prompt, output, ttft, tpot=0.05):
    return Demand(name, at, prompt, output, Targets(ttft, tpot, None, 60.0), "c", max_tokens=output)


def by_id(result):
    return {record.id: record for record in result.records}


def heard(demands, instances, policy="slackline"):
    """The records, and the events that the scheduler got, with their times."""
    simulation = Simulation(SimulationSettings(instances), build_dispatcher(policy), demands)
    events = []
    simulation.driver._listener = lambda batch, now: events.extend((event, now) for event in batch)
    return by_id(simulation.run()), events


def test_the_first_token_takes_a_step_there():
    alone = [demand("a", 0.0, 1000, 21, 10.0)]
    sent_on, computed = (by_id(simulate(alone, instances=(PREFILL, each)))["a"] for each in (WITH_KV, IN_A_SLOT))
    step_s = A100.decode_a + A100.decode_b * 1000 + A100.decode_c
    # The step computes the last token of the prompt.
    assert computed.ttft_s - sent_on.ttft_s == pytest.approx(A100.prefill_a + A100.prefill_b, rel=0.2)
    assert computed.tpot_s == pytest.approx(step_s, rel=0.01)
    assert (computed.outcome, computed.output_tokens) == (Outcome.OK, 21)


def test_nothing_is_heard_of_it_before():
    """With one slot the second answer reaches the engine, and its transfer counts as ended with its first token."""
    demands = [demand("first", 0.0, 200, 101, 10.0), demand("second", 0.1, 200, 5, 10.0)]
    records, events = heard(demands, (PREFILL, replace(IN_A_SLOT, max_num_seqs=1)), "least_outstanding")
    ends = {event.request_id: now for event, now in events if isinstance(event, ev.TransferDone)}
    firsts = {event.request_id: now for event, now in events if isinstance(event, ev.FirstToken)}
    assert ends == firsts
    assert records["second"].kv_transfer_s < 0.1
    assert firsts["second"] > 1.1
    assert records["second"].ttft_s == pytest.approx(firsts["second"] - 0.1, abs=0.001)


def test_the_default_policy_keeps_them_for_a_free_slot():
    """Whoever is sent on early would wait in the engine's order. At the gateway the one that is due first comes first:
    six patient answers wait when one comes that is due within a second."""
    demands = [demand("first", 0.0, 200, 41, 10.0)]
    demands += [demand(f"patient{index}", 0.1, 200, 40, 30.0) for index in range(6)]
    demands += [demand("soon", 0.2, 200, 40, 1.0)]
    fleet = (PREFILL, replace(IN_A_SLOT, max_num_seqs=1, scheduling_policy="fcfs"))
    assert all(record.attained for record in simulate(demands, instances=fleet).records)
    at_once = by_id(simulate(demands, "least_outstanding", instances=fleet))
    assert not at_once["soon"].attained


def test_leaps_change_nothing():
    demands = [demand(f"r{index}", 0.07 * index, 150 + 9 * index, 12 + index % 7, 5.0) for index in range(60)]
    fleet = (PREFILL, replace(IN_A_SLOT, max_num_seqs=4))
    runs = [simulate(demands, instances=fleet, leaps=leaps) for leaps in (True, False)]
    assert facts(runs[0]) == facts(runs[1])
    assert {record.outcome for record in runs[0].records} == {Outcome.OK}


def test_no_request_is_lost_when_such_an_engine_fails_between_kv_and_first_token():
    """Two answers hold the only slots and others wait in both engines, when one engine fails."""
    demands = [demand(f"r{index}", 0.01 * index, 200, 60, 30.0) for index in range(12)]
    fleet = (PREFILL, *(replace(IN_A_SLOT, max_num_seqs=1),) * 2)
    result = simulate(demands, "least_outstanding", instances=fleet, failures=(Failure(1, 0.3, 1.0),))
    outcomes = [record.outcome for record in result.records]
    assert len(outcomes) == 12
    assert outcomes.count(Outcome.OK) == 11, "the one that had tokens at its client fails"


@pytest.mark.parametrize("mode", ["slackline", "least_outstanding"])
def test_the_answer_is_whole_over_slow_links(mode):
    links = LinkSettings(bandwidth_gb_s=0.5, latency_s=0.01, overlap=True)
    demands = [demand(f"r{index}", 0.1 * index, 900, 15, 5.0) for index in range(20)]
    result = simulate(demands, mode, instances=(PREFILL, replace(IN_A_SLOT, max_num_seqs=2)), links=links)
    assert {(record.outcome, record.output_tokens) for record in result.records} == {(Outcome.OK, 15)}


def test_a_setting_that_is_no_flag_is_refused():
    with pytest.raises(ConfigError) as error:
        replace(IN_A_SLOT, first_token_with_kv="no")
    assert error.value.field == "first_token_with_kv"


@pytest.mark.simulated
def test_the_default_is_at_least_as_good_as_the_baselines_there():
    config = cells()["disaggregated_in_a_slot"]
    config["workload"]["duration_s"] = 10.0
    plan = parse_experiment(config, _no_files, _no_files)
    attained = {each.label: run_policy(plan, each, 33.0)["attainment"] for each in plan.contenders}
    assert attained.pop("slackline") >= max(attained.values())
