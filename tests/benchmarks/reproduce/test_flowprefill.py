"""FlowPrefill's setting measures what it says, and the reproduction runs."""

import json

import pytest

from benchmarks.machine.names import MEASUREMENTS
from benchmarks.reproduce.claims import Section
from benchmarks.reproduce.flowprefill.compatibility import cut_reason, longest_wait_s, past_knee
from benchmarks.reproduce.flowprefill.device import MACHINE, PROFILE, _blocking, attention_square_s, h100
from benchmarks.reproduce.flowprefill.section import PAPER, reproduce
from benchmarks.reproduce.flowprefill.setting import (
    LEVEL,
    MODELS,
    OfferedLoad,
    PrefillBench,
    Size,
    chunked,
    claimed,
    class_priority,
    distserve,
    flowprefill,
    highest,
    instance,
    run,
)
from controller.predict.latency import LatencyModel
from workers.engine.profiles import load_profile

LLAMA = MODELS["Llama3-8B"]
LOAD = OfferedLoad(LLAMA, 200, (1, 2, 3))


def test_the_search_finds_the_edge_from_either_side():
    for first in (0.3, 4.0, 90.0):
        assert highest(lambda x: x <= 10.0, first) == pytest.approx(10.0, rel=0.03)


def test_a_contender_changes_the_engine_and_nothing_else():
    plain = instance(LLAMA, chunked(2048))
    flow = instance(LLAMA, flowprefill())
    assert (plain.engine_kind, flow.engine_kind) == ("continuous", "preemptive_prefill")
    assert plain.latency == flow.latency
    assert instance(LLAMA, distserve(4096)).max_num_batched_tokens == 4096
    assert class_priority().policy_set == "engine_priority_class"


def test_every_request_is_answered_and_counted_once():
    demands = LOAD.demands(4.0, 1)
    for each in (flowprefill(), distserve(256), chunked(2048), class_priority()):
        result, _ = run(each, LLAMA, demands)
        assert len(result.records) == len(demands)


def test_attainment_is_remembered_for_the_curves_and_falls_with_the_rate():
    bench = PrefillBench()
    for rate in (1.0, 4.0, 16.0):
        bench.attainment(chunked(2048), LOAD, rate)
    curve = bench.curve(chunked(2048), LOAD)
    assert [rate for rate, _ in curve] == [1.0, 4.0, 16.0]
    assert curve[0][1] > curve[1][1] > curve[2][1]
    bench.attainment(chunked(2048), OfferedLoad(LLAMA, 200, (1, 2, 3), slo_scale=2.0), 4.0)
    (tight, at_one), (loose, at_two) = bench.scales(chunked(2048), LOAD, 4.0)
    assert (tight, loose) == (1.0, 2.0)
    assert at_two > at_one


def test_the_order_of_the_headline_holds_on_a_small_load():
    """Preemption within a step bears more than chunks in deadline order, and those more than whole prompts in turn."""
    bench = PrefillBench()
    at = {each.label: bench.attainment(each, LOAD, 5.0) for each in (flowprefill(), chunked(2048), distserve(2048))}
    flow, chunks, whole = at.values()
    assert flow > LEVEL > whole
    assert flow > chunks > whole


def test_a_direction_is_not_reached_by_a_tie():
    size = Size(100, (1,), True)
    assert claimed("15", "over", None, 1.0004, size, "").reached is False
    assert claimed("15", "over", None, 1.002, size, "").reached is True
    assert claimed("9", "over", 2.0, 2.0, size, "").reached is True


def test_ahead_past_the_knee_is_asked_only_where_the_baseline_misses_ninety_per_cent():
    assert past_knee([(1.0, 0.98), (0.95, 0.9)]) == []
    assert past_knee([(1.0, 0.98), (0.95, 0.85), (0.5, 0.6)]) == [10.0, -10.0]


def test_what_chunks_save_is_measured():
    load = OfferedLoad(LLAMA, 200, (1,))
    whole = longest_wait_s(flowprefill(), load, 6.0)
    cut = longest_wait_s(flowprefill("cut", {"chunk_tokens": 1024}), load, 6.0)
    assert whole > cut > 0
    reason = cut_reason(0.0248, 0.0148)
    assert "24.8 ms with whole prompts and 14.8 ms with chunks of 8K, where the tightest target is 250 ms" in reason
    assert "save 4.0 % of it" in reason


@pytest.mark.simulated
def test_the_quick_reproduction_runs():
    lines = []
    section = reproduce(lines.append, quick=True)
    assert Section.from_json(section.to_json()) == section
    assert {claim.paper for claim in section.claims} == {PAPER}
    assert {*(f"Fig. {number}" for number in range(9, 18)), "Sec. 6.4"} == {claim.figure for claim in section.claims}
    bare = [claim for claim in section.claims if claim.ours is None]
    assert [claim.figure for claim in bare] == ["Fig. 13"]
    assert all(claim.reason and claim.reached is None for claim in bare)
    assert {"Fig. 10", "Fig. 14", "Fig. 17"} <= {table.title.split(":")[0] for table in section.tables}
    assert len(lines) > 8


def test_what_was_measured_on_a_device_is_judged_by_the_stored_measurement():
    raw = json.loads((MEASUREMENTS / "preempt" / f"{MACHINE}.json").read_text())
    mean, ratio, cost = _blocking(raw)
    assert (mean.ours, mean.reached) == (round(raw["blocking_ms"]["operator"]["mean"], 3), True)
    assert (ratio.ours, ratio.reached, cost.reached) == (raw["ratio_to_operator"]["layer"]["measured"], False, True)
    assert "none queued it would be 3.5" in ratio.reason
    slow = {**raw["blocking_ms"], "operator": {**raw["blocking_ms"]["operator"], "mean": 4.6}}
    mean, _, cost = _blocking({**raw, "blocking_ms": slow, "throughput_cost_pct": 2.1})
    assert (mean.reached, cost.reached) == (False, False)


def test_long_prompts_of_the_measured_model_take_their_attention():
    rows = [{"tokens": 100, "past": past, "attn": 1e-3 + 3e-9 * 2 * 100 * past} for past in (0, 200, 400)]
    assert attention_square_s(rows) == pytest.approx(3e-9)
    model, profile = LatencyModel(h100().latency), LatencyModel(load_profile(PROFILE).coefficients)
    assert model.prefill_sums(2020, 2020**2) == pytest.approx(profile.prefill_sums(2020, 2020**2))
    assert model.prefill_sums(8192, 8192**2) == pytest.approx(0.27, rel=0.1)  # the sum of its operators


def test_the_measured_model_stops_where_its_operators_end():
    model = h100()
    _, simulation = run(flowprefill(), model, OfferedLoad(model, 20, (1,)).demands(20.0, 1))
    (engine,) = (each.engine for each in simulation.cluster)
    assert 0.0 < engine.rounds.blocking_max_s < 0.006  # its longest operator takes 3.7 ms with 8,192 tokens
