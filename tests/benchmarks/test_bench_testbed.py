"""What bench-testbed makes of its runs, and that it says why it cannot run."""

import json

import pytest

from benchmarks import bench_testbed
from benchmarks.bench_testbed import APART, result, table, undisturbed
from benchmarks.testbed.figures import PrefillFigures, cost_pct
from benchmarks.testbed.hosts import hosts_missing, left_over
from benchmarks.testbed.workload import PrefillLoad

TOOK = {"off": [0.100, 0.120, 0.200], "on": [0.103, 0.121, 0.150]}


def served(attainment, cct_ms, ttft_s=1.0, late_p99_ms=1.0):
    return PrefillFigures(attainment, ttft_s, cct_ms, 10.0, late_p99_ms=late_p99_ms)


RUNS = {
    "off": [served(0.4, 200.0, 3.0), served(0.6, 220.0, 5.0)],
    "mfs": [served(0.7, 140.0, 2.0), served(0.8, 160.0, 4.0)],
    APART: [served(0.9, 100.0, 1.5), served(1.0, 110.0, 2.5)],
}
SIMULATED = {"off": [served(0.5, 231.0, 4.0)], "mfs": [served(0.8, 150.0, 3.3)]}


def test_the_figures_that_are_asked_for():
    told = json.loads(json.dumps(result(RUNS, SIMULATED, TOOK)))
    assert told["attainment"] == {"off": 0.5, "mfs": 0.75}
    assert told["cct_ms"] == {"off": 210.0, "mfs": 150.0}
    assert (told["gain"], told["cct_ratio"]) == (1.5, 0.714)
    assert told["contention"] == {"ttft": 2.0, "cct": 2.0}
    assert told["simulator_errors"] == {
        "off": {"cct_ms": 10.0, "ttft_s": 0.0},
        "mfs": {"cct_ms": 0.0, "ttft_s": 10.0},
    }
    assert told["simulator_error_pct"] == 10.0
    assert len(table(told).splitlines()) == 1 + 2 + 2


def test_nobody_in_time_without_a_daemon_has_no_gain():
    runs = {**RUNS, "off": [served(0.0, 200.0)]}
    assert result(runs, SIMULATED, TOOK)["gain"] is None


def test_the_cost_is_that_of_the_median_pair():
    assert cost_pct(TOOK) == pytest.approx(100 * 0.001 / 0.12, abs=0.01)


def test_a_run_on_a_machine_that_does_not_keep_up_is_repeated_and_the_last_one_kept():
    runs = iter([served(0.1, 1.0, late_p99_ms=80.0), served(0.2, 1.0), served(0.3, 1.0)])
    found, dropped = undisturbed(lambda: next(runs), 3)
    assert (found.attainment, dropped) == (0.2, 1)
    runs = iter([served(0.1, 1.0, late_p99_ms=80.0), served(0.2, 1.0, late_p99_ms=90.0)])
    found, dropped = undisturbed(lambda: next(runs), 2)
    assert (found.attainment, dropped) == (0.2, 1)


def test_the_simulation_alone_needs_no_hosts(monkeypatch, capsys):
    monkeypatch.setattr(bench_testbed, "hosts_missing", lambda: "tc missing")
    wanted = ["--simulated", "--ranks", "2", "--counted", "10", "--seeds", "1", "--policies", "shortest_first"]
    monkeypatch.setattr("sys.argv", ["bench_testbed", *wanted])
    bench_testbed.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["simulated"]
    assert set(told["gates"]) == {"off", "mfs", "shortest_first"}
    assert told["gates"]["off"] == told["to_the_byte"]["off"]
    assert told["gates"]["shortest_first"] != told["to_the_byte"]["shortest_first"]


def test_a_policy_that_paces_is_simulated_where_links_are_shared_to_the_byte(monkeypatch, capsys):
    wanted = ["--ranks", "2", "--counted", "6", "--seeds", "1", "--policies", "karuna"]
    monkeypatch.setattr("sys.argv", ["bench_testbed", "--simulated", *wanted])
    bench_testbed.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["simulated"]
    assert set(told["gates"]) == {"off", "mfs"}
    assert set(told["to_the_byte"]) == {"off", "mfs", "karuna"}
    monkeypatch.setattr("sys.argv", ["bench_testbed", *wanted])
    with pytest.raises(SystemExit):
        bench_testbed.main()
    assert "karuna" in capsys.readouterr().err


def test_where_no_testbed_can_be_made_it_says_why(monkeypatch, capsys):
    monkeypatch.setattr(bench_testbed, "hosts_missing", lambda: "tc missing")
    monkeypatch.setattr("sys.argv", ["bench_testbed"])
    bench_testbed.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"skipped": "tc missing"}


@pytest.mark.slow
def test_the_whole_command_runs_in_a_small_form(monkeypatch, capsys):
    if (missing := hosts_missing()) is not None:
        pytest.skip(missing)
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.delenv("BENCH_NICE", raising=False)
    monkeypatch.setattr(bench_testbed, "stop_on_sigterm", lambda: None)
    monkeypatch.setattr(bench_testbed, "PrefillLoad", lambda: PrefillLoad(warm_up=1))
    wanted = ["--ranks", "2", "--mean", "120", "--counted", "3", "--pairs", "2", "--tries", "1"]
    monkeypatch.setattr("sys.argv", ["bench_testbed", *wanted])
    bench_testbed.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    for figure in ("attainment", "cct_ms", "ttft_s", "simulator_errors", "simulated"):
        assert set(told[figure]) == {"off", "mfs"}, figure
    assert all(0.0 <= attained <= 1.0 for attained in told["attainment"].values())
    assert all(took > 0 for took in told["cct_ms"].values())
    assert set(told["contention"]) == {"ttft", "cct"}
    assert {"uncontended_cost_pct", "simulator_error_pct", "gain", "cct_ratio"} <= set(told)
    assert {name: len(runs) for name, runs in told["runs"].items()} == {"off": 1, "mfs": 1, APART: 1}
    assert told["settings"]["counted"] == 3
    assert left_over() == []
