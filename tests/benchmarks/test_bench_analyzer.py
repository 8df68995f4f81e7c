"""bench-analyzer trains on the first part of a trace and asks about the later one."""

import json
import shutil
import subprocess

import pytest

from benchmarks import bench_analyzer
from benchmarks.analyzer.graphs import stage_table
from benchmarks.bench_analyzer import (
    ROOT,
    SHIPPED,
    Answer,
    CutTrace,
    answers,
    cut,
    followed_by_gateway,
    forest_of,
    interval,
    judged,
    pinball,
)
from controller.predict.answer_lengths import FEATURES, PRODUCED
from controller.predict.length_replay import replayed


def test_bounds_on_the_shipped_trace_cover_what_they_claim():
    trace = cut("azure2023_conv", SHIPPED, 1_200)
    assert (len(trace.training), len(trace.asked)) == (600, 600)
    found = judged(trace, forest_of(trace.training))
    assert list(found["coverage"]) == [str(each) for each in PRODUCED]
    at_arrival = found["coverage"]["0"]
    assert at_arrival["answers"] == 600
    assert 0.85 <= at_arrival["adaptive"] <= 0.95
    low, high = at_arrival["adaptive_interval"]
    assert low <= at_arrival["adaptive"] <= high
    assert found["pinball"]["less"] > 0.1, "prompts say something about answers here"
    assert found["coverage"]["400"]["kept"] < found["coverage"]["400"]["fixed"], "a bound that is refined holds longer"


def test_a_trace_without_long_answers_has_no_figures_of_them():
    asked = [Answer("", (float(at % 7), *(1.0,) * (len(FEATURES) - 1)), 20 + at % 90, float(at)) for at in range(400)]
    found = judged(CutTrace("azure2023_code", asked[:200], asked[200:]), forest_of(asked[:200]))
    assert list(found["coverage"]) == list(found["bound_over_truth"]) == ["0", "50", "100"]


@pytest.mark.parametrize("name", ["swebench_agent_sessions", "claude_code_sessions_head5000"])
def test_of_agents_other_runs_are_asked_about(tmp_path, name):
    import gzip

    path = tmp_path / f"{name}.csv.gz"
    rows = [f"{at},10,{10 + at},{at % 4}" for at in range(12)]
    path.write_bytes(gzip.compress("\n".join(["arrival_s,input_tokens,output_tokens,session", *rows]).encode()))
    trace = cut(name, path, None)
    assert {each.session for each in trace.training} == {"0", "2"}
    assert {each.session for each in trace.asked} == {"1", "3"}


def test_an_answer_is_known_only_once_it_has_ended(tmp_path):
    import gzip

    path = tmp_path / "swebench_agent_sessions.csv.gz"
    rows = ["arrival_s,input_tokens,output_tokens,session", "0,10,100,a", "1,20,5,a", "10,30,7,a", "11,40,9,b"]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    trace = cut("swebench_agent_sessions", path, None)
    assert [each.session for each in trace.training] == ["a"] * 3
    assert [each.session for each in trace.asked] == ["b"]
    calls = [dict(zip(FEATURES, each.features, strict=True))["workflow_calls"] for each in trace.training]
    assert calls == [0, 0, 2], "after 1 s the answer of 100 tokens still ran"


def test_figures():
    import numpy as np

    truth, bound = np.array([10.0, 30.0]), np.array([20.0, 20.0])
    assert pinball(truth, bound) == (0.1 * 10 + 0.9 * 10) / 2
    assert interval(np.array([True] * 10), ["a"] * 10) == [1.0, 1.0]
    assert Answer("s", (1.0,), 3).tokens == 3


@pytest.mark.parametrize(("options", "found"), [([], {"coverage": 0.9}), (["--no-live"], None)])
def test_the_live_part_is_in_the_last_line_unless_it_is_left_out(monkeypatch, capsys, options, found):
    asked = []
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setattr(bench_analyzer, "QUICK_ROWS", 400)
    monkeypatch.setattr(bench_analyzer, "live", lambda lengths, **how: asked.append(how) or {"coverage": 0.9})
    assert bench_analyzer.main(options) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last.get("live") == found
    assert asked == ([] if found is None else [{"quick": True, "seed": bench_analyzer.SEED}])
    assert "azure2023_conv" in last["coverage"]


@pytest.mark.parametrize("there", [True, False])
def test_make_reads_all_traces_where_they_are_beside_the_project(tmp_path, there):
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(ROOT / "Makefile", project)
    shutil.copytree(ROOT / "requirements", project / "requirements")
    if there:
        tmp_path.joinpath("shared", "data", "traces").mkdir(parents=True)
    asked = ["make", "-n", "bench-analyzer", "bench-policies", "BENCH_ARGS=--no-live"]
    lines = subprocess.run(asked, cwd=project, capture_output=True, text=True, check=True).stdout.splitlines()
    analyzer, policies = (next(line for line in lines if f"bench_{name}" in line) for name in ("analyzer", "policies"))
    folder = f"--traces {'/'.join(('..', 'shared', 'data', 'traces'))} " if there else ""
    assert " ".join(analyzer.split()).endswith(f"-m benchmarks.bench_analyzer {folder}--no-live")
    assert "--traces" not in policies


def test_a_live_part_that_fails_costs_no_other_figure(monkeypatch, capsys):
    def live(lengths, **how):
        raise RuntimeError("the gateway answered 504")

    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setattr(bench_analyzer, "QUICK_ROWS", 400)
    monkeypatch.setattr(bench_analyzer, "live", live)
    assert bench_analyzer.main([]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["live"] == {"error": "the gateway answered 504"}
    assert "azure2023_conv" in last["coverage"]


def test_errors_of_stages_are_a_table_by_stage_and_rule():
    stages = {"0": {"steps": 40, "even_split": 0.2}, "10": {"steps": 7, "even_split": 0.125, "due_own_share": 0.05}}
    heads, first, second = (line.split() for line in stage_table("a_trace", stages).splitlines())
    assert heads == ["a_trace", "steps", "even_split", "due_own_share"]
    assert first == ["from", "step", "0", "40", "0.2", "-"]
    assert second == ["from", "step", "10", "7", "0.125", "0.05"]


def written(path, rows):
    import gzip

    path.write_bytes(gzip.compress("\n".join(["arrival_s,input_tokens,output_tokens,session", *rows]).encode()))
    return path


def test_of_several_gateways_each_knows_the_calls_that_came_to_it(tmp_path):
    path = written(tmp_path / "a.csv.gz", [f"{10 * at},{100 + at},5,a" for at in range(40)])
    asked = answers(path, None, sessions=True, gateways=2)
    assert {each.gateway for each in asked} == {0, 1}
    for gateway in (0, 1):
        mine = [dict(zip(FEATURES, each.features, strict=True)) for each in asked if each.gateway == gateway]
        assert [each["workflow_calls"] for each in mine] == list(range(len(mine)))
    alone = answers(path, None, sessions=True)
    assert [dict(zip(FEATURES, each.features, strict=True))["workflow_calls"] for each in alone] == list(range(40))


def test_each_gateway_follows_its_own_levels():
    """The bounds of one are what they are without the other's answers."""
    trace = cut("azure2023_conv", SHIPPED, 1_200, gateways=2)
    forest = forest_of(trace.training)
    both = followed_by_gateway(forest, trace.asked)
    first = [each for each in trace.asked if each.gateway == 0]
    mine = [bounds for each, bounds in zip(trace.asked, both, strict=True) if each.gateway == 0]
    assert mine == replayed(forest, [each.timed for each in first])


def test_what_several_gateways_cost_is_told_by_itself(monkeypatch, capsys):
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setattr(bench_analyzer, "QUICK_ROWS", 400)
    assert bench_analyzer.main(["--gateways", "2"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["gateways"], list(last["azure2023_conv"])) == (2, ["one", "trained_on_one", "trained_on_all"])
    assert all(0 <= each["coverage"]["0"][0] <= 1 for each in last["azure2023_conv"].values())


def test_what_a_prediction_adds_on_the_loop_and_in_a_thread_is_told_by_itself(monkeypatch, capsys):
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setattr(bench_analyzer, "QUICK_ROWS", 400)
    assert bench_analyzer.main(["--arrivals"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["arrivals"]
    assert list(found) == ["off", "loop", "thread", "loop_only"]
    assert all(each["latency_p50_ms"] > 0 and each["cpu_ms"] > 0.5 for each in found.values())
    assert all("added_cpu_ms" in found[way] for way in ("loop", "thread", "loop_only"))
