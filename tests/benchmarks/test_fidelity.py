"""How a simulation is compared with what was measured, and the recorded runs where the data are at hand."""

import pytest

from benchmarks.fidelity_compare import Seen, compare, table, worst
from benchmarks.fidelity_live import RealRun, refitted, seen, simulated
from benchmarks.fidelity_recorded import ENGINES, RECORDINGS, Row, calibrate, read, recorded
from benchmarks.profiled import Profiled
from benchmarks.workloads import MIXES, sustained
from controller.core.types import LatencyCoefficients
from controller.predict.latency import LatencyModel
from controller.predict.latency_records import Served


def run(attainment, *ttfts):
    return Seen(attainment, {"a": attainment}, ttfts)


def test_errors_are_against_the_median_of_the_real_runs():
    real = [run(0.80, 1.0, 2.0), run(0.90, 1.2, 2.4), run(0.84, 1.1, 2.2)]
    found = compare(real, run(0.94, 1.21, 2.75))
    assert found["attainment_spread_points"] == pytest.approx(10.0)
    assert found["attainment_error_points"] == pytest.approx(10.0)
    assert found["ttft_p50_error_pct"] == pytest.approx(10.0)
    assert found["ttft_p95_error_pct"] == pytest.approx(25.0)
    assert found["reached"] == {"attainment": True, "ttft_p50": True, "ttft_p95": False}


def test_five_points_hold_where_the_spread_is_smaller():
    assert compare([run(0.8, 1.0)] * 3, run(0.76, 1.0))["reached"]["attainment"]
    assert not compare([run(0.8, 1.0)] * 3, run(0.74, 1.0))["reached"]["attainment"]


def test_the_worst_is_taken_by_size_and_marked():
    entries = [
        {"what": "x", **compare([run(0.8, 1.0)], run(0.6, 0.7))},
        {"what": "y", **compare([run(1, 1.0)], run(1, 1.1))},
    ]
    assert worst(entries)["attainment_error_points"] == pytest.approx(-20)
    assert worst(entries)["ttft_p50_error_pct"] == pytest.approx(-30)
    assert "-20.0*" in table(entries)
    assert "+10.0%" in table(entries)


def test_calibration_takes_the_first_to_end():
    rows = [Row(i * 0.1, Served(100 + i, 20, i * 0.1 + 1, i * 0.1 + 1 + 0.02 * 19)) for i in range(90)]
    latency, used = calibrate(rows)
    assert used == set(range(30))
    assert latency.decode_a > 0


@pytest.mark.skipif(not RECORDINGS.exists(), reason="the recorded runs are not at hand")
def test_recorded_runs_on_real_engines():
    entries = recorded()
    assert len(entries) == len(ENGINES) == 3
    assert all(all(entry["reached"].values()) for entry in entries)
    with pytest.raises(ValueError, match="no recording"):
        read(RECORDINGS, ENGINES[0]._replace(gpu="none"))


PROFILE = Profiled(LatencyCoefficients(0.01, 2e-4, 0.0, 0.01, 1e-6, 2e-4)._asdict(), 131_072)
TRUTH = LatencyCoefficients(**PROFILE.coefficients)


def test_a_simulation_agrees_with_itself():
    plan = sustained(MIXES["4-task"], 10.0, 1, 20.0)
    for policy in ("round_robin", "slackline"):
        one = seen(simulated(plan, policy, TRUTH, PROFILE, 0.002), plan, MIXES["4-task"])
        found = compare([one] * 3, one)
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


def test_a_calibration_run_gives_the_step_times_back():
    plan = sustained(MIXES["4-task"], 20.0, 3, 40.0)
    found, truth = (
        LatencyModel(refitted(simulated(plan, "round_robin", TRUTH, PROFILE, 0.002), plan)),
        LatencyModel(TRUTH),
    )
    for shape in ((0, 0, 10, 1500), (600, 600 * 600, 10, 1500)):
        assert found.step(*shape) == pytest.approx(truth.step(*shape), rel=0.1)
