"""`/metrics` of the console: workflows of the last hour, each once."""

from __future__ import annotations

import time

import pytest
from django.db import OperationalError

from console.live.ttl_cache import TtlCache
from console.views.site import metrics
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db", "live_store")]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(metrics, "PAGE", TtlCache(0.0))
    monkeypatch.setattr(metrics, "WORKFLOWS", TtlCache(0.0))


def goodput_lines(client):
    text = client.get("/metrics").content.decode()
    return [line for line in text.splitlines() if line.startswith("slackline_goodput_hour")]


def test_a_workflow_counts_once_by_class(client):
    step = {"kind": "workflow", "reason": "workflow_inherited", "at": 0.0, "figures": {"left_s": 5}}
    at = time.time() - 60
    factories.records_stored(
        *(factories.record(arrived_at=at + after, workflow="kept", decisions=[step]) for after in (0, 1)),
        factories.record(arrived_at=at, workflow="broke", decisions=[step], outcome="failed"),
        factories.record(arrived_at=at - 7200, workflow="old", decisions=[step]),
        factories.record(arrived_at=at),
    )
    who = '{slo_class="interactive",tenant="acme"}'
    assert goodput_lines(client) == [
        f"slackline_goodput_hour_workflows_finished{who} 2.0",
        f"slackline_goodput_hour_workflows{who} 1.0",
        f"slackline_goodput_hour_workflow_tokens{who} 240.0",
    ]


def test_without_the_database_there_are_no_figures_and_the_rest_stays(client, monkeypatch):
    asked = []

    def gone(**given):
        asked.append(given)
        raise OperationalError("gone")

    monkeypatch.setattr(metrics, "WORKFLOWS", TtlCache(60.0))
    monkeypatch.setattr(metrics, "workflow_goodput", gone)
    assert goodput_lines(client) == []
    assert b"slackline_live_available" in client.get("/metrics").content
    assert len(asked) == 1  # a scrape does not wait for it again at once
