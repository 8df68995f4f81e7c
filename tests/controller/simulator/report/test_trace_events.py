"""The Chrome trace of a run loads, its spans nest, and its size is bounded."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from controller.core.steps import Step
from controller.core.types import Outcome
from controller.dispatch import build_dispatcher
from controller.simulator import Failure, LinkSettings, Simulation, SimulationSettings
from controller.simulator.__main__ import main
from controller.simulator.report.trace_events import MICRO, TraceWriter
from tests.controller.simulator.fleet.test_disaggregation import TWO_AND_TWO
from tests.controller.simulator.runs import SMALL, facts, some_demands
from tests.controller.simulator.test_experiment import GOOD


def traced(demands, instances=TWO_AND_TWO, most=10**6, **more):
    parts = []
    writer = TraceWriter(parts.append, most)
    settings = SimulationSettings(tuple(instances), **more)
    result = Simulation(settings, build_dispatcher("slackline"), demands, trace=writer).run()
    writer.close()
    return result, json.loads("".join(parts)), writer


def request_spans(events):
    """By request: (name, start, end, depth), with every end matching the innermost begin."""
    spans, open_spans = defaultdict(list), defaultdict(list)
    for event in events:
        if event["ph"] == "b":
            open_spans[event["id"]].append((event["name"], event["ts"]))
        elif event["ph"] == "e":
            name, start = open_spans[event["id"]].pop()
            assert name == event["name"]
            assert start <= event["ts"]
            spans[event["id"]].append((name, start, event["ts"], len(open_spans[event["id"]])))
    assert not any(open_spans.values())
    return spans


@pytest.mark.parametrize("leaps", [True, False])
def test_steps_lie_in_their_lanes_and_never_overlap(leaps):
    result, trace, _ = traced(some_demands(60), leaps=leaps)
    lanes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert set(lanes.values()) == {"requests", "engine-0", "engine-1", "engine-2", "engine-3"}
    steps = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            steps[lanes[event["pid"]]].append(event)
    for use in result.instances:
        mine = sorted(steps[use.id], key=lambda e: e["ts"])
        assert sum(e["args"]["repeats"] for e in mine) == use.steps
        assert sum(e["dur"] for e in mine) == pytest.approx(use.busy_s * MICRO)
        for before, after in pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    assert {e["name"] for e in steps["engine-0"]} == {"prefill"}
    assert {e["name"] for e in steps["engine-2"]} == {"decode"}


def test_each_request_is_queued_prefilled_moved_and_decoded_within_its_life():
    links = LinkSettings(bandwidth_gb_s=1.0)
    result, trace, _ = traced(some_demands(60, rate=600.0), links=links)
    spans = request_spans(trace["traceEvents"])
    for record in result.records:
        *stages, (name, start, end, depth) = spans[record.id]
        assert (name, depth) == (record.slo_class, 0)
        assert (start, end) == pytest.approx((record.at * MICRO, (record.at + record.e2e_s) * MICRO))
        assert stages[0][1] == start
        assert stages[-1][2] == end
        assert all(before[2] == after[1] for before, after in pairwise(stages))
        lengths = {stage: (to - since) / MICRO for stage, since, to, _ in stages}
        before_first = sum(lengths.get(stage, 0.0) for stage in ("queue", "prefill", "transfer"))
        assert before_first == pytest.approx(record.ttft_s)
        assert lengths.get("transfer", 0.0) == pytest.approx(record.kv_transfer_s or 0.0)
    assert any("queue" in [stage[0] for stage in each] for each in spans.values())


def test_cut_and_collocated_requests_nest_too():
    for instances, failures in ((TWO_AND_TWO, (Failure(2, 0.5), Failure(0, 1.0))), ((SMALL,), (Failure(0, 0.5, 1.0),))):
        result, trace, _ = traced(some_demands(60, rate=60.0), instances, failures=failures, network_s=0.003)
        assert any(record.outcome is not Outcome.OK for record in result.records)
        assert set(request_spans(trace["traceEvents"])) == {record.id for record in result.records}


def test_events_are_bounded_and_what_is_left_out_is_counted():
    _, whole, _ = traced(some_demands(60))
    _, cut, writer = traced(some_demands(60), most=100)
    kept = [event for event in cut["traceEvents"] if event["ph"] != "M"]
    everything = [event for event in whole["traceEvents"] if event["ph"] != "M"]
    assert len(kept) <= 100
    assert cut["traceEvents"][-1]["args"] == {"events": writer.dropped}
    assert len(kept) + writer.dropped == len(everything)
    request_spans(cut["traceEvents"])


def test_a_trace_costs_nothing_that_a_run_would_notice():
    demands = some_demands(60)
    traced_run, _, _ = traced(demands)
    plain = Simulation(SimulationSettings(TWO_AND_TWO), build_dispatcher("slackline"), demands).run()
    assert facts(traced_run) == facts(plain)


def test_an_empty_trace_is_a_trace():
    parts = []
    TraceWriter(parts.append).close()
    assert json.loads("".join(parts))["traceEvents"][0]["args"] == {"name": "requests"}


def test_mixed_steps_are_named():
    parts = []
    writer = TraceWriter(parts.append)
    writer.step("e", Step(1, (), (), 0), 3, 1.0, 2.0)
    writer.close()
    (step,) = [e for e in json.loads("".join(parts))["traceEvents"] if e["ph"] == "X"]
    assert (step["name"], step["ts"], step["dur"], step["args"]["repeats"]) == ("decode", 1e6, 1e6, 3)


def test_run_writes_one_and_compare_does_not(tmp_path, capsys):
    config, path = tmp_path / "c.json", tmp_path / "trace.json"
    config.write_text(json.dumps(GOOD))
    assert main(["run", str(config), "--trace", str(path)]) == 0
    assert len(request_spans(json.loads(path.read_text())["traceEvents"])) == 40
    capsys.readouterr()
    assert main(["compare", str(config), "--trace", str(path)]) == 2
    assert "use run" in capsys.readouterr().err
    assert main(["run", str(config), "--trace", str(tmp_path / "no" / "where")]) == 2
    assert "No such file" in capsys.readouterr().err
