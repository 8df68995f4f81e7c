"""The page's charts say what the runs' records say."""

from __future__ import annotations

import json

import pytest

from controller.core.types import Outcome, Targets
from controller.simulator.report.charts import figures
from controller.simulator.report.page import page
from controller.simulator.report.summary import distribution, report
from controller.simulator.runner import summary
from tests.controller.simulator.runs import simulate, some_demands

TARGETS = Targets(0.3, 0.02, None, 3600.0)


@pytest.fixture(scope="module")
def results():
    return {
        (policy, rate): simulate(some_demands(60, rate=rate, targets=TARGETS), policy)
        for rate in (20.0, 200.0)
        for policy in ("round_robin", "slackline")
    }


@pytest.fixture(scope="module")
def found(results):
    entries = [
        {"policy": policy, "policy_set": policy, "rate": rate, **summary([report(result)])}
        for (policy, rate), result in results.items()
    ]
    return {"name": "two loads", "seeds": [1], "knee": None, "entries": json.loads(json.dumps(entries))}


def drawn(found):
    return {title: json.loads(figure.to_json()) for title, figure in figures(found)}


def line(chart, name):
    (trace,) = [trace for trace in chart["data"] if trace["name"] == name]
    return trace


def test_distributions_are_the_records_and_mark_the_targets(results, found):
    charts = drawn(found)
    for what, title in (
        ("ttft_s", "Time to first token"),
        ("tpot_s", "Time per output token"),
        ("e2e_s", "End to end"),
    ):
        chart = charts[f"{title}, 200 requests/s"]
        for policy in ("round_robin", "slackline"):
            records = results[policy, 200.0].records
            seen = sorted(value for record in records if (value := getattr(record, what)) is not None)
            trace = line(chart, policy)
            assert trace["x"] == distribution(seen)
            assert (trace["x"][0], trace["x"][-1]) == (round(seen[0], 5), round(seen[-1], 5))
            assert (trace["y"][0], trace["y"][50], trace["y"][-1]) == (0.0, 0.5, 1.0)
        promised = [shape["x0"] for shape in chart["layout"].get("shapes", [])]
        assert promised == {"ttft_s": [0.3], "tpot_s": [0.02], "e2e_s": []}[what]
    titled = charts["Time to first token, 20 requests/s"]["layout"]
    assert titled["annotations"][0]["text"] == "c0, c1, c2 0.3 s"


def test_goodput_is_a_line_over_rate_for_each_policy(results, found):
    chart = drawn(found)["Token goodput"]
    for policy in ("round_robin", "slackline"):
        runs = [results[policy, rate] for rate in (20.0, 200.0)]
        expected = [sum(record.goodput_tokens for record in run.records) / run.ended_at for run in runs]
        trace = line(chart, policy)
        assert trace["x"] == [20.0, 200.0]
        assert trace["y"] == pytest.approx(expected)
        assert "lines" in trace["mode"]
    kept = line(drawn(found)["Attained requests"], "slackline")["y"]
    assert kept[0] == pytest.approx(sum(r.attained for r in results["slackline", 20.0].records)
                                    / results["slackline", 20.0].ended_at)  # fmt: skip


def test_a_run_that_served_nothing_is_a_page_all_the_same():
    hasty = Targets(1e-4, 1e-4, None, 0.0)
    result = simulate(some_demands(5, targets=hasty), "slackline")
    assert {record.outcome for record in result.records} <= {Outcome.REFUSED, Outcome.EXPIRED}
    entry = {"policy": "slackline", "policy_set": "slackline", "rate": None, **summary([report(result)])}
    found = {"name": "nothing", "seeds": [1], "knee": None, "entries": [entry]}
    assert line(drawn(found)["Time to first token, the workload's own rate"], "slackline")["x"] == []
    assert "<script src" not in page(found)


def test_a_distribution_has_its_ends_and_its_middle():
    assert distribution([]) == []
    assert distribution([2.0]) == [2.0] * 101
    values = [float(n) for n in range(201)]
    assert distribution(values)[:3] == [0.0, 2.0, 4.0]
    assert distribution(values)[50] == 100.0


def test_one_run_is_told_by_class_and_over_time(results):
    """Every count of the queue is drawn, every class has its line, and shares kept are the report's."""
    run = json.loads(json.dumps(report(results["slackline", 200.0])))
    entry = {"policy": "slackline", "policy_set": "slackline", "rate": 200.0, **summary([run])}
    found = {"name": "one", "knee": None, "entries": [entry], "run": run}
    charts = drawn(found)
    kept = line(charts["Attainment by class"], "all targets")
    assert dict(zip(kept["x"], kept["y"], strict=True)) == {
        "all": run["attainment"], **{name: own["attainment"] for name, own in run["by_class"].items()}
    }  # fmt: skip
    assert line(charts["Attainment by class"], "TPOT")["y"][0] == run["tpot_met"]
    for name in ("c0", "c1", "c2"):
        assert line(charts["Time to first token"], name)["x"] == run["by_class"][name]["distribution"]["ttft_s"]
    over_time = charts["Requests over time"]
    assert line(over_time, "queued")["y"] == run["queue"]["queued"]
    assert line(over_time, "instances")["y"] == run["queue"]["instances"]
    assert "Requests over time" in page(found)


def test_a_search_for_goodput_is_drawn_as_lines_over_the_rates_it_tried(results, found):
    lines = {
        policy: [entry for entry in found["entries"] if entry["policy"] == policy]
        for policy in ("round_robin", "slackline")
    }
    best = [line[0] for line in lines.values()]
    searched = {"name": "s", "level": 0.8, "seeds": [1], "goodput": {"round_robin": 20.0, "slackline": 20.0}}
    charts = drawn({**searched, "lines": lines, "entries": best})
    assert list(charts) == [
        "Goodput", "Attainment", "Token goodput", "Attained requests",
        "Time to first token, each at its goodput", "Time per output token, each at its goodput",
        "End to end, each at its goodput", "Requests waiting, each at its goodput",
    ]  # fmt: skip
    assert line(charts["Attainment"], "slackline")["x"] == [20.0, 200.0]
    assert [shape["y0"] for shape in charts["Attainment"]["layout"]["shapes"]] == [0.8]
    first = line(charts["Time to first token, each at its goodput"], "slackline, 20 requests/s")
    assert first["x"] == lines["slackline"][0]["first_seed"]["distribution"]["ttft_s"]
