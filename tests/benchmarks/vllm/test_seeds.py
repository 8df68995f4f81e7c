"""Seeds of bench-vllm that were measured on several machines are told together, each against its own baselines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.bench_vllm import VllmComparison
from benchmarks.load.journal import RunJournal
from benchmarks.vllm.plan import CONTENDERS, LOADS, PlannedLoad
from benchmarks.vllm.seeds import best_windows, read, table, told
from tests.benchmarks.test_bench_vllm import Scripted

LOAD = PlannedLoad("4-task", "burst", 1.7, per_task=1)


class OtherMachine(Scripted):
    """One where round robin does better, and wider windows are best."""

    def through_gateway(self, policy, overrides, plan, tasks):
        window = overrides.get("pacing", {}).get("window")
        if policy == "round_robin":
            return self._score(0.5, tasks)
        return self._score(0.6 + window / 1000, tasks) if window else super().through_gateway(policy, {}, plan, tasks)


@pytest.fixture
def files(tmp_path):
    """The first seed on one machine, the second and third on another, each with its own sweep."""
    paths = [tmp_path / machine / "runs.jsonl" for machine in ("old", "new")]
    VllmComparison(Scripted(), range(1), sweep=True, journal=RunJournal(paths[0])).load(LOAD, 30.0)
    VllmComparison(OtherMachine(), range(1, 3), sweep=True, journal=RunJournal(paths[1])).load(LOAD, 40.0)
    return paths


def test_each_seed_counts_once_with_its_machines_own_windows(files):
    seeds = read(files)[LOAD.name]
    assert [(seed.machine, seed.rate) for seed in seeds] == [("old", 30.0), ("new", 40.0), ("new", 40.0)]
    windows = best_windows(seeds)
    assert windows["old"]["edf_best"] == 20
    assert windows["new"]["edf_best"] == 80
    entry = told(LOAD, seeds)
    assert entry["edf_best"]["attainment_spread"] == [0.68, 0.7]
    assert entry["round_robin"]["attainment"] == 0.5  # the median of 0.3, 0.5, 0.5
    assert all(entry[contender.name]["runs"] == 3 for contender in CONTENDERS)
    assert [seed["round_robin"] for seed in entry["within_seed"]] == [0.31, 0.31, 0.31]  # without Slackline
    assert [seed["best_baseline"] for seed in entry["within_seed"]] == [0.7, 0.7, 0.7]


def test_a_seed_that_lacks_a_policy_is_left_out(files):
    lines = files[1].read_text().splitlines()
    ours = [json.loads(line)["run"] for line in lines]
    last = max(i for i, run in enumerate(ours) if run["policy"] == "slackline")
    files[1].write_text("\n".join(line for i, line in enumerate(lines) if i != last) + "\n")
    assert len(told(LOAD, read(files)[LOAD.name])["seeds"]) == 2


def test_runs_from_before_there_were_direct_ones_still_make_a_table(files):
    for path in files:
        lines = [line for line in path.read_text().splitlines() if "direct_" not in json.loads(line)["run"]["policy"]]
        path.write_text("\n".join(lines) + "\n")
    entry = told(LOAD, read(files)[LOAD.name])
    assert "direct_round_robin" not in entry
    assert [seed["round_robin"] for seed in entry["within_seed"]] == [0.3, 0.5, 0.5]
    assert "| - | - |" in table([entry])


def test_one_window_alone_is_no_sweep(tmp_path):
    path = tmp_path / "quick" / "runs.jsonl"
    VllmComparison(Scripted(), range(1), sweep=False, journal=RunJournal(path)).load(LOAD, 30.0)
    assert told(LOAD, read([path])[LOAD.name]) is None


def test_the_table_has_a_row_a_load_and_a_cell_a_policy(files):
    entry = told(LOAD, read(files)[LOAD.name])
    head, rule, row = table([entry]).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert "30.0 and 40.0/s" in row
    assert "(20, 80)" in row  # the windows of both machines
    assert "1.29x" in row  # 0.9 over 0.7


def test_the_command_says_what_is_missing_and_ends_with_json(files):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm.seeds", *map(str, files)], capture_output=True, text=True, check=True
    )
    assert len(json.loads(done.stdout.splitlines()[-1])["by_load"]) == 1
    assert done.stderr.count("0 of 0 seeds") == len(LOADS) - 1
    refused = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm.seeds", "nowhere.jsonl"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "nowhere.jsonl" in refused.stderr
