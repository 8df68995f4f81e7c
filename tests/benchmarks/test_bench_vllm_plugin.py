"""The load and figures of bench-vllm-plugin, without a server."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.load.lengths import STOP_TOKEN
from benchmarks.load.workloads import sustained
from benchmarks.vllm.plugin_plan import (
    CAP_TOKENS,
    CONTENDERS,
    LONG_TAIL,
    PluginFigures,
    differing_share,
    over_best,
)

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
    assert report["over_best"]["1.3"] == {"plugin_s_edf": 0.857, "plugin_urgency": 0.857, "plugin_calm": 1.143}
    assert over_best(report["attainment"]["1.3"]) == report["over_best"]["1.3"]


def test_throughput_is_compared_within_a_round() -> None:
    figures = PluginFigures(seconds={"fcfs": [10.0, 20.0, 40.0], "plugin_s_edf": [10.0, 25.0, 40.0]})
    assert figures.report()["throughput_share"] == {"plugin_s_edf": 1.0}


def test_answers_are_equal_only_if_all_were() -> None:
    assert not PluginFigures().report()["equal_alone"]
    assert not PluginFigures(equal_alone={"plugin_s_edf": True, "plugin_calm": False}).report()["equal_alone"]
    assert differing_share([[1, 2], [3]], [[1, 2], [4]]) == 0.5
