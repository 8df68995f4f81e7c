"""A simulated prefill engine that suspends: conservation, promises kept, and the settings' mistakes found."""

from dataclasses import replace

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.core.steps import Aborted, Added, Seq
from controller.core.types import LatencyCoefficients, Outcome, Targets
from controller.dispatch import build_dispatcher
from controller.predict.operator_profile import read_operator_profile
from controller.simulator import Demand, InstanceSettings, Simulation, SimulationSettings
from controller.simulator.fleet.preemptive_instance import PreemptiveInstance
from tests.controller.simulator.runs import simulate, some_demands

A100 = LatencyCoefficients(6.6252e-3, 5.5413e-5, 1.521e-9, 1.15e-2, 8.2e-8, 3.66e-5)
PREFILL = InstanceSettings(
    A100,
    kv_tokens=400_000,
    max_num_seqs=128,
    max_model_len=65_536,
    prefix_caching=False,
    engine_kind="preemptive_prefill",
    batching="slo_aware_batching",
)


def with_boundary(boundary, **more):
    return replace(PREFILL, preemption={"boundary": boundary, **more})


def long_then_short(short_at=0.2):
    return [
        Demand("long", 0.0, 30_000, 1, Targets(60.0, 1.0, None, 3600.0)),
        Demand("short", short_at, 200, 1, Targets(0.25, 1.0, None, 3600.0)),
    ]


def ttft(demands, instance):
    return {record.id: record.ttft_s for record in simulate(demands, "round_robin", (instance,)).records}


def test_a_short_prompt_waits_for_an_operator_a_layer_a_chunk_or_all():
    alone = A100.prefill_a + A100.prefill_b * 200 + A100.prefill_c * 200**2
    whole = A100.prefill_a + A100.prefill_b * 30_000 + A100.prefill_c * 30_000**2
    waits = {
        kind: ttft(long_then_short(), with_boundary(kind, **more))["short"] - alone
        for kind, more in (("operator", {}), ("layer", {}), ("chunk", {"chunk_tokens": 8192}), ("none", {}))
    }
    assert 0 < waits["operator"] < waits["layer"] <= whole / 32
    assert waits["layer"] < waits["chunk"] < waits["none"]
    assert waits["none"] == pytest.approx(whole - 0.2)


def test_suspension_costs_the_suspended_exactly_what_the_other_took():
    found = ttft(long_then_short(), with_boundary("operator"))
    whole = A100.prefill_a + A100.prefill_b * 30_000 + A100.prefill_c * 30_000**2
    alone = A100.prefill_a + A100.prefill_b * 200 + A100.prefill_c * 200**2
    assert found["long"] == pytest.approx(whole + alone)


@pytest.mark.parametrize("boundary", ["operator", "layer", "chunk", "none"])
def test_every_request_ends_with_all_its_tokens_and_no_device_time_is_lost(boundary):
    instance = with_boundary(boundary, **({"chunk_tokens": 512} if boundary == "chunk" else {}))
    demands = some_demands(count=120, rate=12.0, longest=3000, targets=Targets(0.4, 0.1, None, 3600.0))
    result = simulate(demands, "round_robin", (instance, instance))
    assert sorted(record.id for record in result.records) == sorted(demand.id for demand in demands)
    for record in result.records:
        assert record.outcome is Outcome.OK
        assert record.output_tokens == len(record.token_times)
        assert list(record.token_times) == sorted(record.token_times)
    prompts = sum(demand.prompt_tokens for demand in demands)
    assert sum(use.prompt_tokens for use in result.instances) == prompts


def test_the_same_seed_gives_the_same_result():
    demands = some_demands(count=80, rate=15.0, longest=4000)
    first, second = (simulate(demands, "round_robin", (with_boundary("layer"),)) for _ in range(2))
    assert [r.ttft_s for r in first.records] == [r.ttft_s for r in second.records]


def test_rounds_are_about_two_a_request():
    quick, slow = Targets(0.3, 1.0, None, 3600.0), Targets(9.0, 1.0, None, 3600.0)
    demands = [
        replace(demand, output_tokens=1, targets=slow if demand.prompt_tokens > 1000 else quick)
        for demand in some_demands(count=200, rate=6.0, longest=3000)
    ]
    settings = SimulationSettings((with_boundary("operator"),))
    simulation = Simulation(settings, build_dispatcher("round_robin"), demands)
    simulation.run()
    (instance,) = simulation.cluster
    rounds = instance.engine.rounds
    assert rounds.rounds == 2 * 200 - rounds.batched
    assert rounds.preempts > 0


def operators(*durations):
    """Of every step alike: one layer in 32 of A100's 8B, seconds by operator."""
    row = dict(zip(("qkv_proj", "attn", "o_proj", "gate_up_proj", "down_proj"), durations, strict=True))
    sizes = [{"tokens": tokens, **row} for tokens in (1, 60_000)]
    return read_operator_profile({"layers": 32, "rows": sizes}, 1)


EVEN, UNEVEN = operators(1.0, 1.0, 1.0, 1.0, 1.0), operators(0.1, 4.6, 0.1, 0.1, 0.1)


def blocking(boundary, measured):
    """Mean seconds from a signal to its answer: long prompts of 3 s with urgent ones coming at random moments."""
    rng = np.random.default_rng(3)
    urgent = [
        Demand(f"u{i}", float(at), 64, 1, Targets(0.2, 1.0, None, 3600.0))
        for i, at in enumerate(np.sort(rng.uniform(0.1, 290.0, 600)))
    ]
    long = [Demand(f"l{i}", 3.6 * i, 30_000, 1, Targets(3600.0, 1.0, None, 3600.0)) for i in range(80)]
    settings = SimulationSettings((replace(with_boundary(boundary), operators=measured),))
    simulation = Simulation(settings, build_dispatcher("round_robin"), [*urgent, *long])
    simulation.run()
    (instance,) = simulation.cluster
    rounds = instance.engine.rounds
    assert rounds.signals > 300
    return rounds.blocking_s / rounds.signals


def test_blocking_follows_the_measured_operators():
    """sum(d^2) / (2 sum d) of a layer of 30,000 tokens: 1/5 of it where operators are alike, nearly all where one is
    long; at layer boundaries it is the same for both."""
    layer = (A100.prefill_a + A100.prefill_b * 30_000 + A100.prefill_c * 30_000**2) / 32
    assert blocking("operator", EVEN) == pytest.approx(layer / 10, rel=0.1)
    assert blocking("operator", UNEVEN) == pytest.approx(layer * (4.6**2 + 4 * 0.01) / 50, rel=0.1)
    assert blocking("layer", EVEN) == pytest.approx(layer / 2, rel=0.1)
    assert blocking("layer", UNEVEN) == blocking("layer", EVEN)
    assert blocking("operator", EVEN) < blocking("operator", None) < blocking("operator", UNEVEN)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine_kind": "magic"}, "engine_kind"),
        ({"role": "decode"}, "engine_kind"),
        ({"all_reduce_share": 1.0}, "all_reduce_share"),
        ({"batching": "chunked_prefill"}, "batching"),
        ({"preemption": {"granularity": 3}}, "preemption.granularity"),
        ({"preemption": {"boundary": "kernel"}}, "boundary"),
        ({"model_shape": "gpt"}, "shape"),
        ({"engine_kind": "continuous", "preemption": {"boundary": "layer"}}, "preemption"),
        ({"operators": EVEN, "all_reduce_share": 0.1}, "all_reduce_share"),
    ],
)
def test_bad_settings_are_refused(changes, field):
    with pytest.raises(ConfigError) as caught:
        replace(PREFILL, **changes)
    assert caught.value.field == field


def test_it_is_the_prefill_side_of_disaggregation():
    """1P1D: a long prompt makes way for a short one, and both decode elsewhere with all their tokens."""
    decode = InstanceSettings(A100, kv_tokens=400_000, max_num_seqs=64, max_model_len=65_536, role="decode")
    prefill = replace(with_boundary("operator"), role="prefill")
    targets = {"long": Targets(60.0, 0.1, None, 3600.0), "short": Targets(0.25, 0.1, None, 3600.0)}
    demands = [
        Demand("long", 0.0, 30_000, 20, targets["long"], max_tokens=20),
        Demand("short", 0.2, 200, 5, targets["short"], max_tokens=5),
    ]
    result = simulate(demands, "round_robin", (prefill, replace(decode, prefix_caching=False)))
    found = {record.id: record for record in result.records}
    assert {name: record.output_tokens for name, record in found.items()} == {"long": 20, "short": 5}
    assert found["short"].ttft_met
    assert found["short"].ttft_s < 0.1  # the whole prompt ahead of it would take 3 s
    whole = A100.prefill_a + A100.prefill_b * 30_000 + A100.prefill_c * 30_000**2
    prefilled_s = found["long"].ttft_s - found["long"].kv_transfer_s
    assert prefilled_s == pytest.approx(whole + A100.prefill_a + A100.prefill_b * 200, abs=1e-3)


@pytest.mark.parametrize("boundary", ["operator", "chunk", "none"])
def test_disaggregated_under_load_nothing_is_lost(boundary):
    prefill = replace(with_boundary(boundary, **({"chunk_tokens": 512} if boundary == "chunk" else {})), role="prefill")
    small = replace(prefill, kv_tokens=8192, max_model_len=4096)
    decode = InstanceSettings(A100, kv_tokens=16_384, max_model_len=4096, role="decode", prefix_caching=False)
    demands = some_demands(count=150, rate=14.0, longest=3000, targets=Targets(0.4, 0.1, None, 3600.0))
    result = simulate(demands, "round_robin", (small, decode))
    assert sorted(record.id for record in result.records) == sorted(demand.id for demand in demands)
    assert all(record.outcome is Outcome.OK for record in result.records)
    for record, demand in zip(sorted(result.records, key=lambda r: int(r.id[1:])), demands, strict=True):
        assert record.output_tokens == demand.output_tokens == len(record.token_times)


def alone(**settings):
    return PreemptiveInstance("p0", replace(PREFILL, **settings), 0.0, leaps=False)


def kept(name, at, tokens, due):
    return Seq(name, at, tokens, 1, ignore_eos=True, due=due, ttft_s=due - at, keep_kv=True)


def test_a_prompt_is_nearly_computed_after_three_quarters_of_its_step_and_not_while_it_lies_suspended():
    instance, long, short = alone(), kept("long", 0.0, 30_000, 60.0), kept("short", 0.2, 200, 0.45)
    whole = A100.prefill_a + A100.prefill_b * 30_000 + A100.prefill_c * 30_000**2
    other = A100.prefill_a + A100.prefill_b * 200 + A100.prefill_c * 200**2
    instance.tell([Added(long)], 0.0)
    assert instance.due == pytest.approx(0.75 * whole)
    instance.tell([Added(short)], 0.2)
    heard = {}
    while instance.due is not None:
        now = instance.due
        instance.complete(now)
        heard |= dict.fromkeys([seq.id for seq in instance.ending if seq.id not in heard], now)
    assert heard == {"short": pytest.approx(0.2 + 0.75 * other, abs=0.05), "long": pytest.approx(0.75 * whole + other)}


def test_a_chunked_prompt_is_nearly_computed_when_its_last_chunk_begins():
    instance, chunk = alone(preemption={"boundary": "chunk", "chunk_tokens": 8192}), 8192
    instance.tell([Added(kept("long", 0.0, 2 * chunk + 1, 60.0))], 0.0)
    for _ in range(2):
        assert instance.ending == []
        instance.complete(instance.due)
    assert [seq.id for seq in instance.ending] == ["long"]


def test_nothing_more_is_said_of_one_that_hung_up():
    instance, seq = alone(), kept("long", 0.0, 30_000, 60.0)
    instance.tell([Added(seq)], 0.0)
    instance.tell([Aborted(seq)], 0.1)
    while instance.due is not None:
        instance.complete(instance.due)
    assert instance.ending == []
