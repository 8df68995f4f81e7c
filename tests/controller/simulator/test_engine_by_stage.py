"""`engine_kind: slackline` simulates what an engine started with `--scheduler slackline` runs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients, Targets
from controller.engine import PreemptivePrefill
from controller.policies.batching import selects
from controller.simulator import Demand, InstanceSettings
from controller.simulator.experiment import parse_experiment
from tests.controller.simulator.runs import FAST, SMALL, facts, simulate, some_demands
from workers.engine.config import parse
from workers.engine.scheduler_choice import build_scheduler

ROLES = ("collocated", "prefill", "decode")
BY_STAGE = replace(SMALL, engine_kind="slackline")
CALM_OF_THE_SET = {"rectangles": True, "slots": 96, "prefill_s": FAST.prefill_b}
DECODE_OF_THE_SET = {name: getattr(FAST, name) for name in ("decode_a", "decode_b", "decode_c")} | {"if_needed": True}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("deadlines", [False, True])
def test_it_is_what_serves(role, deadlines, fleet_token):
    options = ["--port", "1", "--role", role, "--scheduler", "slackline", "--max-num-batched-tokens", "3000"]
    live = parse([*options, "--deadlines"] if deadlines else options)
    latency = live.profile.coefficients
    serving = build_scheduler(live.engine, live.batching, live.preemption, latency, live.batching_options)
    settings = InstanceSettings(
        LatencyCoefficients(*latency), role=role, engine_kind="slackline", deadlines=deadlines,
        max_num_batched_tokens=3000,
    )  # fmt: skip
    simulated = settings.build_engine()
    assert type(simulated) is type(serving)
    assert type(simulated.batching) is type(serving.batching)
    assert simulated.batching.config == serving.batching.config
    assert settings.spec("e").selects == selects(serving.batching.name)
    if isinstance(serving, PreemptivePrefill):
        assert simulated.preemption == serving.preemption


@pytest.mark.parametrize(
    ("deadlines", "parts"),
    [
        (False, {"batching": "chunked_prefill"}),
        (True, {"batching": "calm", "batching_settings": CALM_OF_THE_SET}),
    ],
)
def test_collocated_engines_run_what_the_parts_run(deadlines, parts):
    demands = some_demands(60, rate=60.0, seed=5)
    runs = [
        simulate(demands, instances=(engine, engine))
        for engine in (replace(BY_STAGE, deadlines=deadlines), replace(SMALL, **parts))
    ]
    assert facts(runs[0]) == facts(runs[1])


def test_stages_apart_run_what_the_parts_run():
    demands = some_demands(60, rate=60.0, seed=6)
    rules = {"batch_tokens": SMALL.max_num_batched_tokens}
    by_hand = (
        replace(
            SMALL, role="prefill", engine_kind="preemptive_prefill", batching="slo_aware_batching",
            batching_settings=rules,
        ),
        replace(SMALL, role="decode", batching="kairos_decode", batching_settings=DECODE_OF_THE_SET),
    )  # fmt: skip
    chosen = tuple(replace(BY_STAGE, role=each.role) for each in by_hand)
    assert facts(simulate(demands, instances=chosen)) == facts(simulate(demands, instances=by_hand))


def test_what_is_given_goes_before_what_the_set_says(fleet_token):
    given = {"slots": 32, "preemption": {"threshold": 0.5}}
    options = ["--port", "1", "--scheduler", "slackline", "--deadlines", "--batching-options", json.dumps(given)]
    live = parse(options)
    simulated = InstanceSettings(
        LatencyCoefficients(*live.profile.coefficients), engine_kind="slackline", deadlines=True,
        batching_settings=given,
    ).build_engine()  # fmt: skip
    assert live.batching.config == simulated.batching.config
    assert (live.batching.config.slots, live.batching.config.rectangles) == (32, True)
    assert live.batching.config.preemption.threshold == 0.5


def test_what_is_given_goes_before_the_profile(fleet_token):
    options = ["--port", "1", "--role", "prefill", "--scheduler", "slackline", "--batching-options", '{"prefill_b": 1}']
    live = parse(options)
    serving = build_scheduler(
        live.engine, live.batching, live.preemption, live.profile.coefficients, live.batching_options
    )
    assert serving.batching.config.prefill_b == 1
    assert serving.batching.config.prefill_a == live.profile.coefficients.prefill_a


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine_kind": "slackline", "batching": "calm"}, "batching"),
        ({"deadlines": True}, "deadlines"),
        ({"engine_kind": "slackline", "deadlines": "yes"}, "deadlines"),
        ({"engine_kind": "slackline", "preemption": {"boundary": "layer"}}, "preemption"),
        ({"engine_kind": "slackline", "batching_settings": {"slots": 4}}, "batching_settings.slots"),
        ({"batching": "calm", "batching_settings": {"slots": 0}}, "batching_settings.slots"),
        ({"batching": "calm", "batching_settings": {"slots": "4"}}, "batching_settings.slots"),
        ({"decode_by": "mean"}, "decode_by"),
    ],
)
def test_a_setting_without_effect_is_refused(changes, field):
    with pytest.raises(ConfigError) as caught:
        replace(SMALL, **changes)
    assert caught.value.field == field


def test_an_experiment_file_names_it_for_all_or_for_one_contender():
    raw = {
        "instances": {"profile": {"coefficients": FAST._asdict()}, "engine_kind": "slackline"},
        "workload": {"kind": "mix", "mix": "4-task", "rate": 1.0, "per_task": 2},
        "policies": ["slackline", {"name": "slackline", "label": "deadlines", "engine": {"deadlines": True}}],
    }
    plain, deadlines = (each.settings for each in parse_experiment(raw, dict, list).contenders)
    common = parse_experiment(raw, dict, list).settings
    assert [use(common).instances[0].part.batching for use in (plain, deadlines)] == ["chunked_prefill", "calm"]


@pytest.mark.parametrize(
    ("rate", "slots", "decode"),
    [(60, 24, FAST._replace(decode_b=1e-6)), (35, 16, LatencyCoefficients(*(2 * each for each in FAST)))],
    ids=["as fast as prefill", "half as fast"],
)
def test_the_sets_decode_engine_attains_as_much_as_one_that_decodes_all(rate, slots, decode):
    """Decode is the bottleneck, and answers have time: those with long prompts were delayed up to their TPOT, and kept
    the slots for which others wait with their first token."""
    prefill = replace(SMALL, role="prefill", kv_tokens=65_536, max_num_batched_tokens=2048)
    second = replace(SMALL, role="decode", kv_tokens=65_536, max_num_seqs=slots, latency=decode)
    short, loose = Targets(0.5, 0.2, None, 3600.0), Targets(3.0, 0.4, None, 3600.0)
    rng = np.random.default_rng(9)
    at = np.cumsum(rng.exponential(1 / rate, 400))
    demands = [
        Demand(f"r{i}", float(at[i]), 40, 40, short, "short", max_tokens=40)
        if rng.random() < 0.6
        else Demand(f"r{i}", float(at[i]), 800, 40, loose, "long", max_tokens=40)
        for i in range(400)
    ]
    shares = {}
    for name, engine in (("set", {"engine_kind": "slackline"}), ("all", {"batching": "chunked_prefill"})):
        result = simulate(demands, instances=(prefill, prefill, replace(second, **engine)), keep=False)
        shares[name] = sum(record.attained is True for record in result.records) / len(demands)
    assert shares["all"] > 0.9
    assert shares["set"] >= shares["all"] - 0.01
