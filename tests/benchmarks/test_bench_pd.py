"""What bench-pd asks of its modes and makes of their runs."""

import json
import math

import pytest

from benchmarks import bench_pd
from benchmarks.bench_pd import AFTER, FLEETS, ONE_SHOT, PD, answer, collocated, experiment, simulated, summary, table
from benchmarks.load.scoring import Score
from controller.dispatch.policy_sets import build_dispatcher, build_migrator


def score_of(attainment, e2e_s=2.0, gap_s=0.1):
    return Score(attainment, {}, e2e_s, e2e_s, {"document": 0.4, "story": 0.2}, {}, {"ok": 1}, gap_s)


MOVED = {"kv_received_bytes": 5e9, "kv_receiving_seconds": 10.0, "kv_received": 400.0, "kv_early_bytes": 4e9}


@pytest.fixture
def by_mode():
    scores = [score_of(0.9), score_of(1.0, 3.0, 0.3), score_of(0.95)]
    apart = summary({"scores": scores, "dropped": 1, **MOVED}) | {"simulated": 0.97}
    together = summary({"scores": scores[:1], "dropped": 0}) | {"simulated": 0.8}
    return {"collocated": together, "pd": apart}


def test_medians_and_what_moved(by_mode):
    found = by_mode["pd"]
    assert (found["attainment"], found["spread"], found["e2e_mean_s"]) == (0.95, [0.9, 1.0], 2.0)
    assert (found["ttft_p50_s"], found["largest_gap_s"], found["dropped"]) == (pytest.approx(0.3), 0.3, 1)
    assert (found["kv_bytes"], found["kv_gb_per_s"], found["kv_early_share"]) == (5e9, 0.5, 0.8)


def test_a_mode_in_which_no_one_got_a_token_is_a_figure_too():
    nobody = Score(0.0, {}, 25.0, 25.0, {"document": math.nan, "story": math.nan}, {}, {"failed": 2}, 0.1)
    found = summary({"scores": [nobody], "dropped": 0})
    assert (found["attainment"], found["ttft_p50_s"], found["kv_bytes"]) == (0.0, None, 0.0)


def test_bytes_and_bandwidth_are_in_the_json_by_mode(by_mode):
    found = json.loads(json.dumps(answer(by_mode)))
    assert found["attainment"] == {"collocated": 0.9, "pd": 0.95}
    assert found["simulated"] == {"collocated": 0.8, "pd": 0.97}
    assert found["kv_bytes"] == {"collocated": 0.0, "pd": 5e9}
    assert found["kv_gb_per_s"] == {"collocated": None, "pd": 0.5}


def test_bytes_and_bandwidth_are_in_the_table(by_mode):
    _, head, together, apart = table(FLEETS["equal"], by_mode, 40.0).splitlines()
    assert "KV moved" in head
    assert "GB/s each" in head
    assert apart.split()[-4:] == ["5.00", "GB", "0.50", "80%"]
    assert together.split()[-4:] == ["0.00", "GB", "-", "-"]


def test_modes_run_the_policy_set_as_it_is_but_for_what_they_are_about():
    default = build_migrator("slackline").placement.name
    assert [build_migrator("slackline", mode.overrides).placement.name for mode in (PD, AFTER)] == [default] * 2
    assert build_migrator("slackline", ONE_SHOT.overrides).placement.name == "one_shot"
    build_dispatcher("slackline", ONE_SHOT.overrides)


def test_the_simulated_fleet_has_the_roles_and_the_load():
    plan = experiment(FLEETS["equal"], collocated(512), 10, 1.0)
    assert [(spec.role, spec.max_num_batched_tokens) for spec in plan.settings.instances] == [("collocated", 512)] * 4
    assert (
        sorted(spec.role for spec in experiment(FLEETS["equal"], PD, 10, 1.0).settings.instances)
        == ["decode"] * 2 + ["prefill"] * 2
    )


def test_a_light_load_is_attained_in_the_simulator():
    assert simulated(FLEETS["equal"], PD, 4.0, 10, [1], 1.0) == 1.0


def test_decode_engines_that_differ_are_placed_by_what_they_keep():
    """The A100 cannot keep the tight TPOT; a decode instance chosen by its load alone gets such requests too."""
    fleet = FLEETS["unequal"]
    ours, one_shot = (simulated(fleet, mode, fleet.rate, 100, [1], 1.0) for mode in (PD, ONE_SHOT))
    assert ours >= 1.1 * one_shot


def test_the_modes_are_simulated_alone_over_the_link_that_is_given(monkeypatch, capsys):
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setattr(bench_pd, "CHUNKS", (512,))
    said = ["bench_pd", "--fleet", "unequal", "--no-live", "--per-task", "40", "--link"]
    found = {}
    for link in ("1", "0.1"):
        monkeypatch.setattr("sys.argv", [*said, link])
        bench_pd.main()
        found[link] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["0.1"]["link_gb_s"] == 0.1
    assert found["0.1"]["simulated"]["collocated"] == found["1"]["simulated"]["collocated"]  # nothing moves
    assert found["0.1"]["simulated"]["pd"] < found["1"]["simulated"]["pd"]
    assert found["1"]["over_one_shot"] == round(found["1"]["simulated"]["pd"] / found["1"]["simulated"]["one_shot"], 3)
