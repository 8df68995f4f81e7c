"""The report of bench-vllm has every key it promises, sweeps once a load, and QUICK stays within its time."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks import bench_vllm
from benchmarks.bench_vllm import QUICK_BUDGET_S, QUICK_DRAIN_S, VllmComparison, climb, fit_to_budget, table
from benchmarks.load.generator import CUTOFF_S, direct_target, gateway_target, without_lengths
from benchmarks.load.scoring import Score
from benchmarks.load.trials import Bench
from benchmarks.load.workloads import MIXES
from benchmarks.servers.stack import StackFleet
from benchmarks.vllm.plan import BASELINES, CONTENDERS, LOADS, QUICK_CONTENDERS, QUICK_LOADS, WINDOWS, PlannedLoad
from controller.core.types import LatencyCoefficients
from controller.dispatch.policy_sets import build_dispatcher

PROMISED = {
    "direct_round_robin",
    "direct_priority_class",
    "round_robin",
    "least_outstanding",
    "edf_best",
    "engine_priority_class",
    "engine_priority_deadline",
    "tpot_arrival_best",
    "slackline",
}


class Scripted:
    """Stands for real servers: attainment by policy set and window; notes every run."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int | None]] = []
        self.direct_runs: list[bool] = []

    def through_gateway(self, policy, overrides, plan, tasks) -> Score:
        window = overrides.get("pacing", {}).get("window")
        self.ran.append((policy, window))
        attained = {"round_robin": 0.3, "slackline": 0.9}.get(policy, 0.7 - abs((window or 20) - 20) / 100)
        return self._score(attained, tasks)

    def direct(self, by_class, plan, tasks) -> Score:
        self.direct_runs.append(by_class)
        return self._score(0.6 if by_class else 0.31, tasks)

    @staticmethod
    def _score(attained, tasks) -> Score:
        classes = {task.name: attained for task in tasks}
        return Score(attained, classes, 2.0, 1.5, {}, {}, {"ok": 4}, 0.02)


@pytest.fixture
def entry():
    bench = Scripted()
    found = VllmComparison(bench, seeds=range(3), sweep=True).load(
        PlannedLoad("4-task", "burst", 1.7, per_task=1), 30.0
    )
    return bench, found


def test_an_entry_has_all_promised_keys(entry):
    _, found = entry
    assert (found["mix"], found["kind"], found["rate"]) == ("4-task", "burst", 30.0)
    for name in PROMISED:
        assert {"attainment", "e2e_mean_s", "by_class", "attainment_spread"} <= set(found[name])
    assert found["slackline"]["attainment"] == 0.9
    assert found["direct_round_robin"]["attainment"] == 0.31
    assert found["direct_priority_class"]["attainment"] == 0.6
    json.dumps(found)


def test_seeds_may_begin_later_on_another_machine():
    bench = Scripted()
    found = VllmComparison(bench, seeds=range(1, 3), sweep=True).load(
        PlannedLoad("4-task", "burst", 1.7, per_task=1), 30.0
    )
    assert found["slackline"]["runs"] == 2
    assert found["windows"]["edf_best"] == 20  # swept on the first seed there is
    assert bench.ran[0][0] == "round_robin"  # the second seed's order: one without Slackline, then this


def test_windows_are_swept_once_and_the_best_is_kept(entry):
    bench, found = entry
    assert found["windows"]["edf_best"] == 20
    assert found["sweep"]["edf_best"].keys() == {"28", "40", "20", "12"}  # outward from 28 to both sides of 20
    edf = [window for policy, window in bench.ran if policy == "edf_window"]
    assert len(edf) == 4 + 2  # the sweep's best run is the first seed's
    assert all(found[name]["runs"] == 3 for name in PROMISED)
    assert sorted(bench.direct_runs) == [False, False, False, True, True, True]


@pytest.mark.parametrize(("best", "tried"), [(8, {28, 20, 12, 8, 40}), (80, {28, 20, 40, 56, 80}), (28, {20, 28, 40})])
def test_a_sweep_climbs_to_the_best_window_wherever_it_lies(best, tried):
    found = climb(WINDOWS, 28, lambda window: Scripted._score(1 / (1 + abs(window - best)), MIXES["4-task"]))
    assert max(found, key=lambda window: found[window].attainment) == best
    assert found.keys() == tried


def test_policies_alternate_in_another_order_with_each_seed(entry):
    bench, _ = entry
    edf = [index for index, (policy, window) in enumerate(bench.ran) if (policy, window) == ("edf_window", 20)]
    robins = [index for index, (policy, _) in enumerate(bench.ran) if policy == "round_robin"]
    slackline = [index for index, (policy, _) in enumerate(bench.ran) if policy == "slackline"]
    assert robins[0] < edf[0] < slackline[0]
    assert robins[1] < slackline[1]
    assert bench.direct_runs == [False, True, True, False, False, True]  # the second seed begins with priorities


def test_the_table_names_every_policy(entry):
    _, found = entry
    text = table([found])
    assert all(name in text for name in PROMISED)
    assert "1.29x the best baseline" in text  # 0.9 against 0.70, the best window
    assert "2.90x round robin without it" in text


def test_contenders_are_real_policy_sets():
    assert {contender.name for contender in CONTENDERS} == PROMISED
    assert set(BASELINES) == PROMISED - {"slackline"}
    for contender in CONTENDERS:
        for window in () if contender.direct else contender.windows or (None,):
            assert build_dispatcher(contender.policy_set, contender.overrides(window)).name == contender.policy_set


def test_the_full_plan_is_the_one_asked_for():
    assert [(load.mix, load.kind, load.times) for load in LOADS] == [
        ("4-task", "burst", 1.0),
        ("4-task", "burst", 1.7),
        ("4-task", "burst", 2.3),
        ("4-task", "sustained", 1.2),
        ("4-task", "sustained", 1.7),
        ("2-task", "burst", 1.3),
    ]
    assert all(load.per_task == 300 and load.duration_s == 90 for load in LOADS)


@pytest.mark.parametrize("knee", [8.0, 14.0, 20.0, 30.0])
def test_quick_fits_its_fifteen_minutes(knee):
    burst, sustained = fit_to_budget(QUICK_LOADS, {"4-task": knee}, spent_s=80.0)
    assert 25 <= sustained.duration_s <= 90
    assert burst.per_task == 300 or sustained.duration_s == 25
    run_s = burst.per_task * 4 / (1.7 * knee) + QUICK_DRAIN_S + sustained.duration_s + CUTOFF_S
    assert 80 + len(QUICK_CONTENDERS) * run_s <= QUICK_BUDGET_S


def test_quick_keeps_the_papers_burst_on_a_usual_machine():
    burst, sustained = fit_to_budget(QUICK_LOADS, {"4-task": 28.0}, spent_s=80.0)
    assert burst == QUICK_LOADS[0]
    assert sustained.duration_s > 30


def test_a_disturbed_run_is_repeated_so_often_and_quick_never():
    def runs(gaps, tries):
        scores = iter(Score(0.5, {}, 2.0, 1.5, {}, {}, {"ok": 4}, gap) for gap in gaps)
        bench = Bench(None, tries=tries)
        return bench.undisturbed(lambda: next(scores)).largest_gap_s, bench.dropped

    assert runs([0.1], 3) == (0.1, 0)
    assert runs([2.0, 0.1], 3) == (0.1, 1)
    assert runs([2.0, 0.9, 1.0], 3) == (0.9, 2)
    assert runs([2.0], 1) == (2.0, 0)


def test_quick_leaves_what_a_full_run_has_stored(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_vllm, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_vllm, "KNEES", tmp_path / "knees.json")
    (tmp_path / "report.json").write_text("full")
    bench = Scripted()
    coefficients = LatencyCoefficients(0.01, 1e-4, 0.0, 0.01, 6e-6, 0.0)._asdict()
    bench.stack = SimpleNamespace(fleet=StackFleet("mid", ["a", "b"], "vllm", 32, coefficients=coefficients))
    bench.dropped = 0
    monkeypatch.setattr(sys, "argv", ["bench_vllm", "--knee", "4-task=12"])
    arguments = bench_vllm.parse(quick=True)
    report = bench_vllm.measure(bench, arguments, True, time.monotonic(), as_stored=True)
    assert (tmp_path / "report.json").read_text() == "full"
    assert json.loads((tmp_path / "quick.json").read_text()) == json.loads(json.dumps(report))
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "quick.json"}
    assert (report["seeds"], report["knee"]["4-task"]["from"]) == (1, "--knee")
    assert len(bench.ran) + len(bench.direct_runs) == len(QUICK_CONTENDERS) * len(QUICK_LOADS)
    assert table(report["by_load"])


def test_quick_runs_what_is_named_and_else_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    named = ["--seeds", "2", "--loads", "2-task burst 1.3x", "--contenders", "slackline,direct_round_robin"]
    monkeypatch.setattr(sys, "argv", ["bench_vllm", *named])
    arguments = bench_vllm.parse(quick=True)
    assert (arguments.seeds, [load.name for load in arguments.loads]) == (2, ["2-task burst 1.3x"])
    assert {contender.name for contender in arguments.contenders} == {"slackline", "direct_round_robin"}
    assert not arguments.fit
    monkeypatch.setattr(sys, "argv", ["bench_vllm"])
    arguments = bench_vllm.parse(quick=True)
    assert (arguments.seeds, arguments.loads, arguments.contenders) == (1, list(QUICK_LOADS), QUICK_CONTENDERS)
    assert arguments.fit


def test_no_request_of_any_contender_tells_its_length() -> None:
    (load,) = (load for load in LOADS if load.mix == "2-task")
    sent = []
    for target in (
        gateway_target("http://gateway", "m", "key", own_targets=True),
        direct_target(["http://engine"], "m", load.tasks, by_class=True),
    ):
        hidden = without_lengths(target, load.tasks)
        for arrival in load.arrivals(8.0, 1)[:50]:
            body = arrival.body("m", **hidden.extra(arrival))
            assert (body["max_tokens"], body.pop("min_tokens")) == (1200, arrival.output_tokens - 1)
            assert body.items() >= target.extra(arrival).items()
            sent.append(body)
    assert len({body["max_tokens"] for body in sent}) == 1
