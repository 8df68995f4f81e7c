"""The page Goodput: requests and tokens in time by type, each workflow once."""

from __future__ import annotations

import re
import time

import pytest

from console.views.traffic import goodput
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]
MISS = {"ttft_met": False, "attained": False, "goodput_tokens": 0}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(goodput, "READ", goodput.TtlCache(0.0))


def shown(client):
    answer = client.get("/goodput/")
    assert answer.status_code == 200
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
    with django_assert_max_num_queries(10):
        answer, text = shown(viewer)
    assert "Latency 75 % 4 3 in time 0.1/min 67.5 % 80 54 in time" in text
    assert "Compound 100 % 1 1 in time 0.0/min 100 % 240 240 in time" in text
    assert "no class acme Compound" in text
    traces = answer.context["charts"]["goodput"]["traces"]
    assert {trace["name"]: sum(trace["y"]) for trace in traces} == {
        "Compound": pytest.approx(240 / 60), "Latency": pytest.approx(54 / 60),
    }  # fmt: skip
    assert {trace["mode"] for trace in traces} == {"markers"}  # a line of one minute would show nothing


def test_the_overview_links_to_it(viewer, live_store):
    assert 'href="/goodput/"' in viewer.get("/").content.decode()
