"""How a simulation is compared with what was measured, and the recorded runs where the data are at hand."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.fidelity import command as fidelity
from benchmarks.fidelity.compare import SeenRun, compare, parts, parts_table, table, worst
from benchmarks.fidelity.live import RealRun, read_at_once, seen, simulated
from benchmarks.fidelity.machine import SPEED_PERIOD_S, KnownMachine, busy_way_s, machine_of, refitted
from benchmarks.fidelity.recorded import ENGINES, RECORDINGS, RecordedRow, calibrate, read, recorded
from benchmarks.load.journal import opened
from benchmarks.load.workloads import MIXES, sustained
from benchmarks.servers.engines import MAX_NUM_SEQS, EngineStartFailed
from benchmarks.servers.stack import ClassSpec, StackFleet
from benchmarks.vllm.profiled import Profiled, estimated_knee
from controller.core.types import LatencyCoefficients
from controller.predict.latency import LatencyModel
from controller.predict.latency_records import Served
from controller.simulator.machine_speed import MachineSpeed


def run(attainment, *ttfts):
    return SeenRun(attainment, {"a": attainment}, ttfts)


def test_errors_are_against_the_median_of_the_real_runs():
    real = [run(0.80, 1.0, 2.0), run(0.90, 1.2, 2.4), run(0.84, 1.1, 2.2)]
    found = compare(real, [run(0.94, 1.21, 2.75)])
    assert found["attainment_spread_points"] == pytest.approx(10.0)
    assert found["attainment_error_points"] == pytest.approx(10.0)
    assert found["ttft_p50_error_pct"] == pytest.approx(10.0)
    assert found["ttft_p95_error_pct"] == pytest.approx(25.0)
    assert found["reached"] == {"attainment": True, "ttft_p50": True, "ttft_p95": False}


def test_five_points_hold_where_the_spread_is_smaller():
    assert compare([run(0.8, 1.0)] * 3, [run(0.76, 1.0)])["reached"]["attainment"]
    assert not compare([run(0.8, 1.0)] * 3, [run(0.74, 1.0)])["reached"]["attainment"]


def test_the_worst_is_taken_by_size_and_marked():
    entries = [
        {"what": "x", **compare([run(0.8, 1.0)], [run(0.6, 0.7)])},
        {"what": "y", **compare([run(1, 1.0)], [run(1, 1.1)])},
    ]
    assert worst(entries)["attainment_error_points"] == pytest.approx(-20)
    assert worst(entries)["ttft_p50_error_pct"] == pytest.approx(-30)
    assert "-20.0*" in table(entries)
    assert "+10.0%" in table(entries)


def test_an_error_is_the_simulators_or_the_machines():
    real = [run(0.8, 1.0), run(0.8, 1.5), run(0.8, 1.0)]
    predicted = {"what": "round_robin", **compare(real, [run(0.8, 1.3)])}
    own = {"what": "round_robin", **compare(real, [run(0.8, 1.05)])}
    [found] = parts([predicted], [own])
    assert found["p50"] == {
        "error_pct": pytest.approx(30),
        "simulator_pct": pytest.approx(5),
        "machine_pct": pytest.approx(25),
        "noise_pct": pytest.approx(50),
        "within": True,
    }
    [other] = parts([predicted], [predicted])
    assert (other["p50"]["within"], other["p50"]["machine_pct"]) == (False, 0.0)
    assert "*" in parts_table([other]).splitlines()[1]
    assert "*" not in parts_table([found]).splitlines()[1]


def test_calibration_takes_the_first_to_end():
    rows = [RecordedRow(i * 0.1, Served(100 + i, 20, i * 0.1 + 1, i * 0.1 + 1 + 0.02 * 19)) for i in range(90)]
    latency, used = calibrate(rows)
    assert used == set(range(30))
    assert latency.decode_a > 0


def test_recorded_runs_on_real_engines():
    entries = recorded()
    assert len(entries) == len(ENGINES) == 3
    assert all(all(entry["reached"].values()) for entry in entries)
    with pytest.raises(ValueError, match="no recording"):
        read(RECORDINGS, ENGINES[0]._replace(gpu="none"))


PROFILE = Profiled(LatencyCoefficients(0.01, 2e-4, 0.0, 0.01, 1e-6, 2e-4)._asdict(), 131_072)
TRUTH = LatencyCoefficients(**PROFILE.coefficients)
WRONG = LatencyCoefficients(0.012, 1.4e-4, 0.0, 0.012, 1e-6, 1e-4)


def test_a_simulation_agrees_with_itself():
    plan = sustained(MIXES["4-task"], 10.0, 1, 20.0)
    for policy in ("round_robin", "slackline"):
        one = seen(simulated(plan, policy, TRUTH, PROFILE, 0.002), plan, MIXES["4-task"])
        found = compare([one] * 3, [one])
        assert found["attainment_error_points"] == found["ttft_p95_error_pct"] == 0
        assert set(one.by_class) == {task.name for task in MIXES["4-task"]}


def test_the_way_to_the_engine_counts_twice():
    plan = sustained(MIXES["4-task"], 0.5, 1, 20.0)
    near, far = (seen(simulated(plan, "round_robin", TRUTH, PROFILE, way), plan, MIXES["4-task"]) for way in (0, 0.05))
    assert far.p50_s - near.p50_s == pytest.approx(0.1, abs=0.01)


def test_who_had_no_token_counts_with_the_time_it_waited():
    (first, second, *_) = plan = sustained(MIXES["4-task"], 2.0, 1, 2.0)
    rows = [[None, None, False, ""]] + [[a.at + 0.5, a.at + 0.6, True, "e"] for a in plan[1:]]
    found = seen(RealRun(rows, 40.0), plan, MIXES["4-task"])
    assert found.ttft_s[0] == pytest.approx(40.0 - first.at)
    assert found.ttft_s[1] == pytest.approx(0.5)
    assert found.attainment == pytest.approx((len(plan) - 1) / len(plan))
    assert second.task.targets.ttft_s >= 0.5


def test_several_simulated_runs_count_by_their_median():
    found = compare([run(0.8, 1.0)], [run(0.5, 1.2), run(0.81, 1.1), run(1.0, 0.9)])
    assert found["attainment_simulated"] == 0.81
    assert found["attainment_error_points"] == pytest.approx(1.0)
    assert found["attainment_simulated_spread_points"] == pytest.approx(50.0)
    assert found["ttft_p50_error_pct"] == pytest.approx(10.0)
    assert found["by_class"] == {"a": [0.8, 0.81]}


@pytest.mark.thorough
@pytest.mark.simulated
def test_calibration_runs_give_the_step_times_back_and_an_even_speed():
    plans = [sustained(MIXES["4-task"], 20.0, seed, 40.0) for seed in (3, 4)]
    runs = [KnownMachine(simulated(plan, "round_robin", TRUTH, PROFILE, 0.002), plan, "round_robin") for plan in plans]
    fit, speeds = refitted(runs, WRONG)
    found, truth = LatencyModel(fit), LatencyModel(TRUTH)
    for shape in ((0, 0, 10, 1500), (600, 600 * 600, 10, 1500)):
        assert found.step(*shape) == pytest.approx(truth.step(*shape), rel=0.1)
    assert [len(speed.series) for speed in speeds] == [2, 2]  # engines
    assert len(speeds[0].series[0]) == len(speeds[0].series[1]) >= 40 / SPEED_PERIOD_S
    every = [series for speed in speeds for series in speed.series]
    quarters = [sorted(series)[round(share * len(series))] for series in every for share in (0.25, 0.75)]
    assert quarters == pytest.approx([1.0] * 8, abs=0.1)
    joined = machine_of(runs, PROFILE, 0.002).speed
    assert joined is not None
    assert [len(series) for series in joined.series] == [sum(len(speed.series[0]) for speed in speeds)] * 2


@pytest.mark.simulated
@pytest.mark.parametrize("policy", ["round_robin", "slackline"])
def test_prompts_that_cost_more_than_the_profile_says_are_told_by_first_tokens(policy):
    """Pauses hide in the decode intervals what prompts and steps take of the time; TTFTs say it."""
    pauses = MachineSpeed(((1.2,) * 10 + (0.05,) * 2, (1.2,) * 9 + (0.05,) * 3), 0.5)
    dearer = TRUTH._replace(prefill_b=1.6 * TRUTH.prefill_b)
    plan = sustained(MIXES["4-task"], 14.0, 7, 40.0)
    run = simulated(plan, policy, dearer, PROFILE, 0.002, pauses)
    found = machine_of([KnownMachine(run, plan, policy)], PROFILE, 0.002)
    share = found.latency.prefill_b / found.latency.decode_a
    assert share / (TRUTH.prefill_b / TRUTH.decode_a) in (pytest.approx(1.4), pytest.approx(1.6), pytest.approx(2.0))


@pytest.mark.simulated
def test_scatter_counts_as_far_as_it_tells_other_runs():
    """Of a machine that pauses all of it, of runs whose apparent scatter is not the machine's little."""
    pauses = MachineSpeed(((1.2,) * 10 + (0.05,) * 2, (1.2,) * 9 + (0.05,) * 3), 0.5)
    plans = [sustained(MIXES["4-task"], 10.0, seed, 24.0) for seed in (7, 8, 9)]

    def known(*speeds):
        runs = [simulated(plan, "round_robin", TRUTH, PROFILE, 0.002, s) for plan, s in zip(plans, speeds, strict=True)]
        return [KnownMachine(run, plan, "round_robin") for run, plan in zip(runs, plans, strict=True)]

    paused = machine_of(known(*(pauses.drawn(k) for k in (1, 2, 3))), PROFILE, 0.002)
    assert paused.amplitude >= 0.75
    even = machine_of(known(None, None, None), PROFILE, 0.002)
    for series in even.speed.series:
        ordered = sorted(series)
        assert ordered[-len(ordered) // 10] / ordered[len(ordered) // 10] < 1.3
    assert min(map(min, paused.speed.series)) < 0.5
    assert machine_of(known(pauses, None, None)[:1], PROFILE, 0.002).amplitude == 1.0  # nothing to hold it to


def test_the_way_to_busy_engines_is_what_first_tokens_take_longer():
    plan = sustained(MIXES["4-task"], 8.0, 3, 30.0)
    near, far = (simulated(plan, "round_robin", TRUTH, PROFILE, way) for way in (0.002, 0.012))
    known = [KnownMachine(far, plan, "round_robin")]
    assert busy_way_s(known, [near], 0.002) == pytest.approx(0.012, abs=0.004)
    assert busy_way_s(known, [far], 0.012) == pytest.approx(0.012)
    assert (
        busy_way_s([KnownMachine(near, plan, "round_robin")], [far], 0.012) == 0.012
    )  # never shorter than to idle engines
    few = [KnownMachine(RealRun(far.requests[:20], far.ended), plan[:20], "round_robin")]
    assert busy_way_s(few, [RealRun(near.requests[:20], near.ended)], 0.002) == 0.002


@pytest.mark.simulated
def test_a_machine_that_paused_is_simulated_as_one_that_pauses():
    """The noise is measured in one run and told for another, of other arrivals."""
    tasks = MIXES["4-task"]
    pauses = MachineSpeed(((1.2,) * 10 + (0.05,) * 2, (1.2,) * 9 + (0.05,) * 3), 0.5)
    known, plan = (sustained(tasks, 20.0, seed, 60.0) for seed in (5, 6))
    run = KnownMachine(simulated(known, "round_robin", TRUTH, PROFILE, 0.002, pauses), known, "round_robin")
    fit, [speed] = refitted([run], TRUTH)
    real = seen(simulated(plan, "round_robin", TRUTH, PROFILE, 0.002, pauses.drawn(9)), plan, tasks)
    told = [seen(simulated(plan, "round_robin", fit, PROFILE, 0.002, speed.drawn(k)), plan, tasks) for k in (1, 2, 3)]
    even = seen(simulated(plan, "round_robin", fit, PROFILE, 0.002), plan, tasks)
    found = compare([real], told)
    assert abs(found["attainment_error_points"]) <= 5.0
    assert abs(found["ttft_p95_error_pct"]) <= 20.0
    assert even.p95_s < 0.7 * real.p95_s


KEPT = Path(__file__).resolve().parents[3] / "docs" / "measurements" / "fidelity"
NOISY = KEPT / "intel-xeon-processor-2-cores" / "noisy"


def test_records_of_a_noisy_machine_leave_every_step_its_time():
    """Two runs on real vLLM, kept: alone the records give decode steps no time (see latency_records)."""
    profile = json.loads((NOISY / "profile.json").read_text())
    with opened(NOISY / "runs.jsonl.gz", "r") as file:
        known = [json.loads(line) for line in file]
    classes = [ClassSpec(task.name, task.targets.ttft_s, task.targets.tpot_s) for task in MIXES["4-task"]]
    fleet = StackFleet("mid", ["a", "b"], "vllm", MAX_NUM_SEQS, classes, profile["coefficients"])
    knee = estimated_knee(fleet, MIXES["4-task"])
    calibration = next(each for each in known if each["run"].get("seed") == 77)
    assert calibration["run"]["rate"] == pytest.approx(knee, abs=1e-4)
    plan, run = sustained(MIXES["4-task"], knee, 77, 60.0), RealRun(**calibration["score"])
    fit, [speed] = refitted([KnownMachine(run, plan, "round_robin")], LatencyCoefficients(**profile["coefficients"]))
    factors = [found / given for found, given in zip(fit, profile["coefficients"].values(), strict=True)]
    assert min(factors) > 0.2
    assert (
        1.4
        < LatencyModel(fit).step(300, 60_000, 20, 3000)
        / LatencyModel(LatencyCoefficients(**profile["coefficients"])).step(300, 60_000, 20, 3000)
        < 2.4
    )
    assert min(map(min, speed.series)) < 0.3
    assert max(map(max, speed.series)) > 1.0


@pytest.mark.thorough
@pytest.mark.simulated
def test_the_whole_measurement_goes_on_where_it_stopped(monkeypatch, tmp_path):
    """With a simulated pair in place of the real one the figures are the simulator against itself."""
    ran = []

    def pair(bench, policy, plan):
        ran.append((policy, len(plan)))
        return simulated(plan, policy, TRUTH, PROFILE, 0.002)

    monkeypatch.setattr(fidelity, "measured", pair)
    monkeypatch.setattr(fidelity, "overhead_s", lambda bench, profile: RealRun([], 0.0, way_s=0.002))
    arguments = argparse.Namespace(
        knee=12.0, times=[0.7, 1.0], seconds=5.0, runs=2, quick=True, resume=False, output=tmp_path / "report.json"
    )
    bench = SimpleNamespace(stack=None, dropped=0)
    report = fidelity.measure(bench, PROFILE, arguments)
    calibrations = ["round_robin", "slackline", "round_robin"]  # before, between and after the pairs of real runs
    both = ["round_robin", "slackline"]
    load = [calibrations[0], *both, calibrations[1], *both, calibrations[2]]
    assert [policy for policy, _ in ran] == load * 2
    sizes = [size for _, size in ran]
    assert len({sizes[i] for i in (1, 2, 4, 5)}) == len({sizes[7 + i] for i in (1, 2, 4, 5)}) == 1
    assert len({sizes[i] for i in (0, 1, 3, 6, 7, 8, 10, 13)}) > 4  # calibrations have arrivals of their own
    assert next(iter(report["by_model"])) == fidelity.FIGURE
    assert list(report["by_model"])[2:4] == ["refitted, always as fitted", "profiled"]
    own = report["by_model"]["each run with its own machine (no prediction)"]
    assert abs(worst(own)["attainment_error_points"]) <= 5
    assert report["way_s"]["idle"] == 0.002
    assert len(report["way_s"]["busy"]) == len(report["amplitude"]) == 2
    assert [each["times_knee"] for each in report["by_model"]["profiled"]] == [0.7, 0.7, 1.0, 1.0]
    assert worst(report["by_model"]["profiled"])["attainment_error_points"] == 0
    assert [len(of["series"]) for of in report["machine_speed"]] == [2, 2]
    assert len(report["latency"]["refitted"]) == 2
    json.dumps(report)
    arguments.resume = True
    assert fidelity.measure(bench, PROFILE, arguments)["by_model"] == report["by_model"]
    assert len(ran) == 14


def test_a_report_from_what_is_on_file_measures_nothing_and_says_what_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "known_knees", dict)  # a machine that was measured has its own on file
    arguments = argparse.Namespace(
        knee=12.0, times=[0.7], seconds=8.0, runs=1, quick=True, resume=False, output=tmp_path / "report.json"
    )
    with pytest.raises(EngineStartFailed, match=r"no profile is on file: .*profile\.json"):
        fidelity.again(arguments)
    kept = {**asdict(PROFILE), "fit": {}}
    arguments.output.with_name("profile.json").write_text(json.dumps(kept))
    with pytest.raises(EngineStartFailed, match="not every run is on file"):
        fidelity.again(arguments)
    arguments.knee = None
    with pytest.raises(EngineStartFailed, match="needs the --knee"):
        fidelity.again(arguments)


def test_answers_that_were_read_at_one_moment_are_counted():
    plan = sustained(MIXES["4-task"], 10.0, 1, 4.0)
    rows = [[a.at + 1, a.at + (1 if i % 4 == 0 else 2), True, "e"] for i, a in enumerate(plan)]
    share = read_at_once(RealRun(rows, 9.0), plan)
    assert share == pytest.approx(0.25, abs=0.03)
    assert read_at_once(RealRun([[None, None, False, ""] for _ in plan], 9.0), plan) == 0.0
