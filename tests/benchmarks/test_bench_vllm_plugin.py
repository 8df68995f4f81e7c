"""The load and figures of bench-vllm-plugin, without a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import bench_vllm_plugin
from benchmarks.bench_vllm_plugin import PluginBench
from benchmarks.load.lengths import STOP_TOKEN
from benchmarks.load.workloads import sustained
from benchmarks.servers.engines import RunningEngine
from benchmarks.vllm.plugin_plan import (
    BLOCK_TOKENS,
    BLOCKS,
    CAP_TOKENS,
    CONTENDERS,
    FCFS,
    LONG_TAIL,
    PLUGINS,
    SHORT_CONTEXT,
    PluginFigures,
    differing_share,
    over_best,
    pairs,
)
from workers.vllm_plugin.policy import DECODES, ORDERS, policy_of, settings_from

PLAN = sustained(LONG_TAIL, 20.0, 1, 20.0)


def test_nothing_but_min_tokens_differs_with_the_length_of_an_answer() -> None:
    assert all(STOP_TOKEN not in arrival.prompt for arrival in PLAN)
    for contender in CONTENDERS:
        for arrival in PLAN:
            body = arrival.body("m", **contender.body(arrival))
            assert (body["max_tokens"], body["min_tokens"]) == (CAP_TOKENS, arrival.output_tokens - 1)
            assert arrival.output_tokens < CAP_TOKENS
            short = replace(arrival, output_tokens=4)
            assert body | {"min_tokens": 3} == short.body("m", **contender.body(short))


def test_answers_have_a_long_tail() -> None:
    lengths = sorted(arrival.output_tokens for arrival in PLAN)
    assert lengths[-1] > 8 * lengths[len(lengths) // 2]


def test_priority_is_the_better_of_both_and_what_the_plug_in_is_compared_with() -> None:
    figures = PluginFigures()
    for of in CONTENDERS:
        for attained in (0.5, 0.6, 0.7):
            better = {"priority_deadline": 0.1, "plugin_calm": 0.2}.get(of.name, 0.0)
            figures.note("1.3", of.name, attained + better)
    report = figures.report()
    assert report["attainment"]["1.3"]["priority"] == 0.7
    assert report["over_best"]["1.3"] == dict.fromkeys(("plugin_s_edf", "plugin_urgency", "plugin_slack"), 0.857) | {
        "plugin_calm": 1.143
    }
    assert over_best(report["attainment"]["1.3"]) == report["over_best"]["1.3"]


def test_throughput_is_compared_within_a_round() -> None:
    figures = PluginFigures(seconds={"fcfs": [10.0, 20.0, 40.0], "plugin_s_edf": [10.0, 25.0, 40.0]})
    assert figures.report()["throughput_share"] == {"plugin_s_edf": 1.0}


def test_answers_are_equal_only_if_all_were() -> None:
    assert not PluginFigures().report()["equal_alone"]
    assert not PluginFigures(equal_alone={"plugin_s_edf": True, "plugin_calm": False}).report()["equal_alone"]
    assert differing_share([[1, 2], [3]], [[1, 2], [4]]) == 0.5


def test_each_kind_of_order_and_of_decode_is_compared() -> None:
    settings = [settings_from({"slackline": each.settings}) for each in PLUGINS]
    assert {"s_edf", "kairos_urgency", "calm"} <= {each.order for each in settings} <= set(ORDERS)
    assert {each.decode for each in settings} == set(DECODES)
    assert len([policy_of(each, 32) for each in settings]) == 4


def test_of_a_pair_each_fits_the_little_kv_and_both_do_not() -> None:
    free = (BLOCKS - 1) * BLOCK_TOKENS  # one block is the server's own
    assert free >= SHORT_CONTEXT
    for pair in pairs(3):
        tokens = [len(each.prompt) + each.output_tokens for each in pair]
        assert max(tokens) <= SHORT_CONTEXT < free < sum(tokens)
        assert all(STOP_TOKEN not in each.prompt and each.output_tokens < CAP_TOKENS for each in pair)
    assert pairs(3) == pairs(3)


def test_what_was_preempted_is_compared_with_what_it_says_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CALM's server preempted nothing, so it says nothing; that of S-EDF goes on with other tokens after it."""
    contenders = [each for each in CONTENDERS if each.name in ("fcfs", "plugin_s_edf", "plugin_slack", "plugin_calm")]
    engines = {each.name: RunningEngine(each.name, f"http://{each.name}", None, None) for each in contenders}
    bench = PluginBench(engines, contenders, 1.0)
    counted = dict.fromkeys((f"http://{each.name}" for each in contenders), 5.0)

    def answered(contender, plan, at_once):
        told = [[sum(each.prompt)] for each in plan]
        if at_once == 2 and contender.name != "plugin_calm":
            counted[f"http://{contender.name}"] += 1.0
            told[1] += [0] if contender.name == "plugin_s_edf" else []
        return told, 1.0

    monkeypatch.setattr(bench, "_batch", answered)
    monkeypatch.setattr(bench_vllm_plugin, "preemptions", counted.__getitem__)
    bench.preempted(2)
    report = bench.figures.report()
    assert report["preemptions"] == {"fcfs": 2, "plugin_s_edf": 2, "plugin_calm": 0, "plugin_slack": 2}
    told = {"fcfs": True, "plugin_s_edf": False, "plugin_calm": None, "plugin_slack": True}
    assert report["equal_preempted"] == told
    assert FCFS in contenders
