"""A benchmark that was cut short goes on where it stopped."""

import pytest

from benchmarks.bench_vllm import VllmComparison
from benchmarks.load.generator import LoadRun, RequestTiming
from benchmarks.load.journal import RunJournal
from benchmarks.load.scoring import score
from benchmarks.load.workloads import MIXES
from benchmarks.vllm.plan import CONTENDERS, PlannedLoad
from tests.benchmarks.test_bench_vllm import Scripted

LOAD = PlannedLoad("4-task", "burst", 1.7, per_task=1)


def run(path, *, resume, seeds=1):
    bench = Scripted()
    found = VllmComparison(bench, range(seeds), sweep=False, journal=RunJournal(path, resume)).load(LOAD, 30.0)
    return found, len(bench.ran) + len(bench.direct_runs)


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.gz"])
def test_nothing_is_measured_twice(tmp_path, name):
    path = tmp_path / name
    first, measured = run(path, resume=False)
    assert measured == len(CONTENDERS)
    again, measured = run(path, resume=True)
    assert measured == 0
    assert again == first


def test_what_is_missing_is_measured(tmp_path):
    path = tmp_path / "runs.jsonl"
    run(path, resume=False)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:5]) + "\n")
    _, measured = run(path, resume=True)
    assert measured == len(lines) - 5
    _, measured = run(path, resume=True, seeds=2)
    assert measured == len(CONTENDERS)


def test_without_resume_it_starts_over(tmp_path):
    path = tmp_path / "runs.jsonl"
    run(path, resume=False)
    _, measured = run(path, resume=False)
    assert measured == len(CONTENDERS)
    assert len(RunJournal(path, resume=True)) == len(CONTENDERS)


def test_another_rate_is_another_run(tmp_path):
    journal = RunJournal(tmp_path / "runs.jsonl")
    bench = Scripted()
    VllmComparison(bench, range(1), sweep=False, journal=journal).load(LOAD, 30.0)
    before = len(bench.ran)
    VllmComparison(bench, range(1), sweep=False, journal=journal).load(LOAD, 31.0)
    assert len(bench.ran) == 2 * before


def test_a_real_score_survives_the_file(tmp_path):
    tasks = MIXES["2-task"]
    samples = [
        RequestTiming(task.name, i, 30, 11, i, i + 0.2, i + 1.2, 11, "ok" if i % 2 else "cut")
        for i, task in enumerate((*tasks, *reversed(tasks)))
    ]
    measured = score(LoadRun(samples, 0.0, 35.0), tasks)
    RunJournal(tmp_path / "runs.jsonl").once({"policy": "a"}, lambda: measured)
    again = RunJournal(tmp_path / "runs.jsonl", resume=True).once({"policy": "a"}, lambda: None)
    assert again == measured
    assert again.outcomes == {"ok": 2, "cut": 2}
