"""The page's charts say what the runs' records say."""

from __future__ import annotations

import json

import pytest

from controller.core.types import Outcome, Targets
from controller.simulator.page import figures, page
from controller.simulator.report import distribution, report
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


def test_distributions_are_the_records_and_mark_what_was_promised(results, found):
    charts = drawn(found)
    for what, title in (
        ("ttft_s", "Time to first token"),
        ("tpot_s", "Time per output token"),
        ("e2e_s", "Whole answer"),
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
    kept = line(drawn(found)["Requests that kept their promises"], "slackline")["y"]
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
