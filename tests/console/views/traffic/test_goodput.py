"""The page Goodput: requests and tokens in time by type, each workflow once."""

from __future__ import annotations

import re
import time

import pytest
from django.db import OperationalError

from console.views.traffic import goodput
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]
MISS = {"ttft_met": False, "attained": False, "goodput_tokens": 0}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(goodput, "READ", {window: goodput.TtlCache(0.0) for window in goodput.WINDOWS})


def shown(client, status=200, **query):
    answer = client.get("/goodput/", query)
    assert answer.status_code == status
    return answer, re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode()))


def test_without_requests_it_says_so(viewer):
    assert "No requests in the last hour" in shown(viewer)[1]


def test_types_have_their_shares_and_a_chart(viewer, django_assert_max_num_queries):
    step = {"kind": "workflow", "reason": "workflow_inherited", "at": 0.0, "figures": {"left_s": 5}}
    at = time.time() - 120
    factories.records_stored(
        *(factories.record(arrived_at=at, goodput_tokens=18) for _ in range(3)),
        factories.record(arrived_at=at, **MISS),
        factories.record(arrived_at=at, workflow="<w>", slo_class="", decisions=[step]),
        factories.record(arrived_at=at + 1, workflow="<w>", **MISS),
    )
    with django_assert_max_num_queries(13):
        answer, text = shown(viewer)
    assert "Latency 75 % 4 3 in time 0.1/min 67.5 % 80 54 in time" in text
    assert "Compound 100 % 1 1 in time &lt;0.1/min 100 % 240 240 in time" in text
    assert "no class acme Compound" in text
    traces = answer.context["charts"]["goodput"]["traces"]
    assert {trace["name"]: sum(trace["y"]) for trace in traces} == {
        "Compound": pytest.approx(240 / 60), "Latency": pytest.approx(54 / 60),
    }  # fmt: skip
    (latency,) = (trace for trace in traces if trace["name"] == "Latency")
    assert (latency["mode"], latency["y"][-1]) == ("lines", 0.0)  # nothing came in the minutes after it


def test_a_minute_that_is_not_over_is_a_point_since_a_line_of_it_would_show_nothing(viewer):
    factories.records_stored(factories.record(arrived_at=time.time()))
    traces = shown(viewer)[0].context["charts"]["goodput"]["traces"]
    assert [trace["mode"] for trace in traces] == ["markers"]


def test_the_overview_links_to_it(viewer, live_store):
    assert 'href="/goodput/"' in viewer.get("/").content.decode()


def test_a_day_is_drawn_by_quarters_of_an_hour(viewer):
    at = time.time() - 5 * 3600
    factories.records_stored(*(factories.record(arrived_at=at - ago) for ago in (0, 3600)))
    answer, text = shown(viewer, window="day")
    assert "in the last 24 hours" in text
    assert "by 15 minutes" in text
    (trace,) = answer.context["charts"]["goodput"]["traces"]
    assert trace["x"][1] - trace["x"][0] == 900
    assert sum(trace["y"]) == pytest.approx(40 / 900)
    assert "No requests in the last hour" in shown(viewer)[1]


def test_a_tenant_is_shown_alone(viewer):
    now = time.time() - 60
    factories.records_stored(
        factories.record(arrived_at=now), factories.record(arrived_at=now, tenant="globex", **MISS)
    )
    assert "interactive globex Latency 0 % 1 0 in time" in shown(viewer, tenant="globex")[1]
    assert "acme" not in shown(viewer, tenant="globex")[1]
    assert "No requests of this tenant in the last hour" in shown(viewer, tenant="nobody")[1]
    assert "Check the filters" in shown(viewer, window="year")[1]


def test_workflows_that_missed_are_listed_with_their_cause(viewer):
    def call(name, left_s, **fields):
        step = {"kind": "workflow", "reason": "workflow_inherited", "at": 0.0, "figures": {"left_s": left_s}}
        return factories.record(workflow=name, arrived_at=time.time() - 60, decisions=[step], **fields)

    factories.records_stored(
        call("kept", 30), call("late", 5, e2e_s=7.5), call("broke", 5, outcome="failed", **MISS),
        factories.record(workflow="free", arrived_at=time.time() - 60, **MISS),
    )  # fmt: skip
    text = shown(viewer)[1]
    assert "late acme 2.50 s late" in text
    assert "broke acme 1 not answered" in text
    assert "free acme 1 missed their own targets" in text
    assert "kept" not in text.partition("Missed workflows")[2]


def test_a_database_that_takes_too_long_is_said(viewer, monkeypatch):
    def times_out(**given):
        raise OperationalError("canceling statement due to statement timeout")

    factories.records_stored(factories.record(arrived_at=time.time() - 60))
    assert "did not answer in time" not in shown(viewer)[1]
    monkeypatch.setattr(goodput, "goodput", times_out)
    text = shown(viewer)[1]
    assert "The database did not answer in time. The figures are those of" in text
    assert "Latency 100 %" in text
    nothing_known = shown(viewer, status=503, window="day")[1]
    assert "Goodput could not be read" in nothing_known
    assert "No requests" not in nothing_known
    assert "Goodput could not be read" in shown(viewer, status=503, tenant="acme")[1]
