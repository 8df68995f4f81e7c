"""The fleet matrix: files are as the cells say, the default loses no request in any of them, and the report adds up."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from benchmarks import bench_fleets
from benchmarks.fleets.cells import DEFAULT, FOLDER, cells, text
from controller.core.decisions import Decision
from controller.core.types import LatencyCoefficients, Outcome, Targets
from controller.simulator.experiment import parse_experiment
from controller.simulator.report.results import RunResult
from controller.simulator.runner import run_once
from controller.simulator.simulation import Simulation
from tests.controller.simulator.runs import simulate, some_demands

RATE = {"disaggregated_1_1": 20.0}
WAVES = (  # requests/s for several instances and for one, and for how many seconds
    ("elastic", (80.0, 20.0), (8.0, 40.0)),
    ("elastic_mixed", (9.0, 40.0), (1.0, 60.0)),
    ("elastic_unlike", (80.0, 20.0), (6.0, 40.0)),
    ("elastic_gateways_2", (80.0, 20.0), (8.0, 40.0)),
    ("elastic_disaggregated", (80.0, 20.0), (8.0, 40.0)),
)


def test_the_files_are_those_of_the_cells():
    assert {path.stem: path.read_text() for path in FOLDER.glob("*.json")} == {
        name: text(config) for name, config in cells().items()
    }


@pytest.mark.parametrize("name", sorted(cells()))
def test_in_every_fleet_all_requests_end_once_and_none_is_refused_wrongly(name):
    config = cells()[name]
    config["workload"]["duration_s"] = 4.0
    plan = parse_experiment(config, lambda _: {}, lambda _: [])
    contender = next(each for each in plan.contenders if each.label == DEFAULT)
    rate = RATE.get(name, 30.0)
    result = run_once(plan, contender, rate, 1000)
    expected = sorted(demand.id for demand in plan.workload.demands(rate, 1000))
    assert sorted(record.id for record in result.records) == expected
    latencies = [instance.latency for instance in plan.settings.instances]
    assert not any(bench_fleets.wrongly_refused(record, latencies) for record in result.records)
    assert bench_fleets.direction_changes(result) <= bench_fleets.changes_allowed(plan)


@pytest.mark.simulated
@pytest.mark.parametrize(("cell", "busy", "quiet"), WAVES)
def test_a_scaler_follows_a_wave_once_and_takes_no_instance_that_work_needs(cell, busy, quiet):
    """Traffic for three or four instances (of the stage that needs them), for one, and for as many again."""
    plan = parse_experiment(cells()[cell], bench_fleets._no_files, bench_fleets._no_files)
    demands, began = [], 0.0
    for number, (rate, seconds) in enumerate((busy, quiet, busy)):
        phase = replace(plan.workload, duration_s=seconds).demands(rate, 1000 + number)
        demands += [replace(each, id=f"{number}.{each.id}", at=began + each.at) for each in phase]
        began += seconds
    contender = next(each for each in plan.contenders if each.label == DEFAULT)
    result = Simulation(contender.settings(plan.settings), contender.build(), demands).run()
    drained_at = [decision.at for decision in result.decisions if decision.kind == "scale_in"]
    assert drained_at
    assert bench_fleets.direction_changes(result) == 2, "out, in, and out again"
    for at in drained_at:
        around = [record.attained for record in result.records if at - 5 <= record.at < at + 10]
        assert around
        assert all(around)
    assert sum(record.attained for record in result.records) >= 0.99 * len(demands)


def test_a_refusal_is_wrong_only_where_an_instance_could_have_kept_the_targets():
    quick, slow = LatencyCoefficients(0.01, 1e-4, 0, 0.01, 0, 0), LatencyCoefficients(0.01, 1e-2, 0, 0.01, 0, 0)
    (record,) = simulate(some_demands(1, targets=Targets(0.5, 0.1, None, 10.0))).records
    record.outcome, record.prompt_tokens = Outcome.REFUSED, 1000
    assert bench_fleets.wrongly_refused(record, [slow, quick])
    assert not bench_fleets.wrongly_refused(record, [slow])
    record.outcome = Outcome.EXPIRED
    assert not bench_fleets.wrongly_refused(record, [quick])


def test_a_stage_changes_direction_by_its_own_decisions():
    result = RunResult("slackline")
    for kind, role in (("scale_out", "prefill"), ("scale_in", "decode"), ("scale_out", "prefill")):
        result.decisions.append(Decision(kind, "load", f"model/{role}", 1.0, {}))
    result.decisions.append(Decision("role_change", "demand_diverged", "model/decode", 1.0, {}))
    assert bench_fleets.direction_changes(result) == 0
    result.decisions.append(Decision("role_change", "demand_diverged", "model/prefill", 2.0, {}))
    assert bench_fleets.direction_changes(result) == 1


@pytest.mark.parametrize(
    ("cell", "most"), [("slots_8", 0), ("elastic", 1), ("elastic_gateways_2", 1), ("elastic_disaggregated", 2)]
)
def test_each_scaled_stage_may_change_direction_once_a_run(cell, most):
    plan = parse_experiment(cells()[cell], bench_fleets._no_files, bench_fleets._no_files)
    assert bench_fleets.changes_allowed(plan) == most


@pytest.mark.parametrize(("changes", "status"), [(1, 0), (2, 1)])
def test_a_fleet_that_flaps_fails_the_benchmark(monkeypatch, capsys, changes, status):
    """A run of 48 s may change direction once, as its traffic ends; twice is one too many."""

    def run_cell(name, duration_s):
        by_policy = {DEFAULT: 1.0, "scorpio": 1.0}
        of_policy = dict.fromkeys(bench_fleets.BY_POLICY, by_policy)
        changed = {"direction_changes_per_h": 75.0 * changes, "most_direction_changes_per_h": 75.0}
        return [{"fleet": name, "rate": 50.0, "times_knee": 2.5, **of_policy, "refused_wrongly": 0, **changed}]

    monkeypatch.setattr(bench_fleets, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(bench_fleets, "run_cell", run_cell)
    assert bench_fleets.main(["--cells", "elastic"]) == status
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["flapping"] == ["elastic at 2.5 knees"] * status


def test_requests_that_were_given_up_count_for_each_policy_with_its_cost():
    config = cells()["slots_8"]
    config["workload"]["duration_s"], config["settings"]["cutoff_s"] = 2.0, 1.0
    plan = parse_experiment(config, bench_fleets._no_files, bench_fleets._no_files)
    contenders = {each.label: each for each in plan.contenders}
    found = {label: bench_fleets.run_policy(plan, contenders[label], 200.0) for label in (DEFAULT, "scorpio")}
    assert found[DEFAULT]["expired"] > 100
    assert found[DEFAULT]["refused"] == 0
    assert found["scorpio"]["refused"] > 100
    assert all(2 * 2.0 <= each["cost"] <= 2 * 3.1 for each in found.values()), "two instances until clients give up"


def test_the_last_line_is_json_with_every_fleet(capsys):
    bench_fleets.main(["--cells", "slots_8", "--duration", "3", "--workers", "1"])
    heading, *rows, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert {len(each) for each in (heading, *rows)} == {len(heading)}
    assert {entry["fleet"] for entry in found["by_fleet"]} == {"slots_8"}
    assert found["refused_wrongly"] == 0
    entry = found["by_fleet"][0]
    for key in bench_fleets.BY_POLICY:
        assert DEFAULT in entry[key]
        assert entry[key].keys() == entry["attainment"].keys()
    assert found["expired"] == sum(entry["expired"][DEFAULT] for entry in found["by_fleet"])
    assert found["worst"] <= entry["attainment"][DEFAULT] - bench_fleets.best_baseline(entry)[1]


@pytest.mark.parametrize(
    ("cell", "rate", "least"),
    [("slots_64", 85.7, 0.985), ("long_prompts", 12.2, 0.9)],
    ids=["at the knee nothing has to be deferred", "long prompts do not stall short answers"],
)
def test_the_default_keeps_what_it_can(cell, rate, least):
    config = cells()[cell]
    config["workload"]["duration_s"] = 10.0
    plan = parse_experiment(config, bench_fleets._no_files, bench_fleets._no_files)
    assert bench_fleets.run_policy(plan, plan.contenders[0], rate)["attainment"] >= least
