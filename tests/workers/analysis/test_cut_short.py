"""Workflows that were cut short, or that may still go on, are not learned from: their graphs would be too short."""

from __future__ import annotations

import random
import time

import pytest
from django.conf import settings
from django.utils import timezone

from controller.predict.pattern_graphs import Call, GraphSet, kind_of
from controller.selectors.records.graph_versions import published_graph_content
from tests import factories
from workers import live
from workers.analysis import graph_versions as module
from workers.analysis.graph_versions import finished_workflows, train_tenants
from workers.workflows import BY_TENANT, OpenWorkflow, cancel_workflow, run_orders

pytestmark = [pytest.mark.db, pytest.mark.django_db]

MEANS_S = (("plan", 2.0), ("search", 3.0), ("write", 15.0))


@pytest.fixture(autouse=True)
def board(redis_server):
    live._client(settings.REDIS_URL).flushdb()


def stored(count, *, seed=0, last="ok", calls=3, ago_s=3_000.0, pause_s=0.5, **fields):
    """Workflows of the first `calls` of a plan, a search and an answer. `last`: how the last of them ended."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        at = time.time() - ago_s + number
        for place, (stage, mean) in enumerate(MEANS_S[:calls], 1):
            took = mean * rng.uniform(0.9, 1.1)
            own = {"workflow": f"w{seed}-{number}", "stage": stage, "e2e_s": took}
            outcome = last if place == calls else "ok"
            rows.append(factories.record(arrived_at=at, **{**own, "outcome": outcome, **fields}))
            at += took + pause_s
    factories.records_stored(*rows)


def ended(outcome, at, took, **fields):
    return factories.record(arrived_at=at, workflow="w1", e2e_s=took, outcome=outcome, **fields)


def found_at(now=None):
    return finished_workflows("acme", now or timezone.now())


@pytest.mark.parametrize(("cut", "last"), [(30, "expired"), (20, "refused"), (10, "cancelled"), (30, "cut")])
def test_workflows_that_were_cut_short_do_not_change_the_graphs(cut, last):
    stored(40)
    stored(cut, seed=1, last=last)  # of the same time: they would be among those that judge
    (row,) = train_tenants()
    assert (row.refused, row.workflows + row.judged) == ("", 40)
    graphs = GraphSet.from_bytes(published_graph_content("acme", 1))
    match = graphs.match([Call(kind_of("demo", "plan"), 0.0, None, 100, 0)])
    assert [each / sum(match.seconds) for each in match.seconds] == pytest.approx(
        [2 / 21, 3.5 / 21, 15.5 / 21], abs=0.03
    )


@pytest.mark.parametrize("outcome", ["failed", "refused", "expired", "cut", "cancelled"])
def test_a_call_that_was_answered_under_its_key_later_cuts_nothing(outcome):
    at = time.time() - 900
    factories.records_stored(
        ended("ok", at, 1.0, step_key="plan"),
        ended(outcome, at + 2, 1.0, step_key="write", error_code="client_closed" if outcome == "cancelled" else ""),
        ended("ok", at + 5, 2.0, step_key="write"),
    )
    (found,) = found_at()
    assert [round(call.began - at) for call in found.calls] == [0, 5]


def test_a_call_that_failed_after_it_was_answered_under_its_key_cuts_nothing():
    at = time.time() - 900
    factories.records_stored(
        ended("ok", at, 1.0, step_key="plan"), ended("refused", at + 2, 0.1, step_key="plan", attempts=0)
    )
    (found,) = found_at()
    assert len(found.calls) == 1


def test_a_call_that_got_the_answer_kept_for_its_key_is_answered():
    """Or that of an equal request. It has no time of its own, as before."""
    at = time.time() - 900
    factories.records_stored(
        ended("ok", at, 1.0, step_key="plan"),
        ended("cut", at + 2, 1.0, step_key="write"),
        ended("ok", at + 5, 0.1, step_key="write", attempts=0),
    )
    (found,) = found_at()
    assert len(found.calls) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_call_without_a_key_has_no_other_attempt(place):
    """Nothing tells which request takes its place, wherever in the workflow it was."""
    at = time.time() - 900
    factories.records_stored(
        ended("ok", at, 1.0), ended("failed", at + 2 - 4 * place, 1.0), ended("ok", at + 5, 2.0, step_key="write")
    )
    assert not found_at()


def test_a_key_counts_within_its_workflow():
    at = time.time() - 900
    factories.records_stored(
        ended("ok", at, 1.0, step_key="plan"),
        ended("failed", at + 2, 1.0, step_key="write"),
        factories.record(arrived_at=at, workflow="w2", step_key="write", e2e_s=1.0),
        factories.record(arrived_at=at, workflow="w1", step_key="write", e2e_s=1.0, tenant="zeta"),
    )
    assert [len(each.calls) for each in found_at()] == [1]


def test_a_workflow_that_was_cancelled_between_two_calls_is_left_out():
    """No request was running, so no record tells it."""
    stored(3, calls=2)
    live.run(run_orders([OpenWorkflow("acme", "w0-1", 3_600.0)]))
    live.run(cancel_workflow("acme", "w0-1", BY_TENANT))
    assert len(found_at()) == 2


def test_without_redis_workflows_are_learned_from_all_the_same(settings, caplog):
    stored(3)
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert len(found_at()) == 3
    assert "cancelled workflows are not known" in caplog.text


def test_a_workflow_that_may_still_go_on_is_left_out():
    """Tools of this tenant run for four minutes: one that has been silent for three is waiting for a tool."""
    stored(20, pause_s=240.0)
    stored(5, seed=1, calls=2, pause_s=1.0, ago_s=195.0)
    assert len(found_at()) == 20
    assert len(found_at(timezone.now() + module.timedelta(seconds=300))) == 25


def test_a_call_that_runs_for_long_is_waited_for():
    """It has no record before it ends, so its workflow seems silent."""
    at = time.time() - 2_000
    rows = [ended("ok", at, 1.0), ended("ok", at + 2, 400.0)]
    rows += [factories.record(arrived_at=time.time() - 300, workflow="w2", e2e_s=1.0)]
    factories.records_stored(*rows)
    assert [len(each.calls) for each in found_at()] == [2]


def test_one_client_that_came_back_much_later_delays_nobody():
    stored(40, ago_s=600.0)
    at = time.time() - 90_000
    factories.records_stored(ended("ok", at, 1.0), ended("ok", at + 80_000, 1.0))
    assert len(found_at()) == 41


def test_a_failed_attempt_shows_that_its_workflow_goes_on():
    at = time.time() - 200
    factories.records_stored(
        ended("ok", at, 1.0, step_key="plan"), ended("ok", at + 2, 1.0, step_key="write"),
        ended("failed", at + 150, 1.0, step_key="write"),
    )  # fmt: skip
    assert not found_at()


def test_a_workflow_that_may_have_begun_before_what_is_read_is_left_out():
    now = time.time()
    factories.records_stored(
        factories.record(arrived_at=now - module.READ_S - 5, workflow="w1", e2e_s=1.0),
        factories.record(arrived_at=now - module.READ_S + 5, workflow="w1", e2e_s=1.0),
        factories.record(arrived_at=now - 900, workflow="w2", e2e_s=1.0),
    )
    assert [len(each.calls) for each in found_at()] == [1]
