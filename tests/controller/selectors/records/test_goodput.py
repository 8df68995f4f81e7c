"""Goodput by type: each request once, each workflow once and all or nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from importlib import import_module
from itertools import permutations

import pytest
from django.db import connection

from controller.core.types import WorkflowCancellation
from controller.models import RequestRecord, WorkflowResult
from controller.selectors.records.goodput import GROUPS, goodput
from controller.selectors.records.requests import of_type
from controller.services.records.goodput import goodput_write
from controller.services.records.requests import records_connection, records_write
from controller.slo.request_types import NOT_NAMED, RequestType
from tests import factories
from tests.waiting import until

pytestmark = [pytest.mark.db, pytest.mark.django_db]
START = datetime.fromtimestamp(factories.NOON, UTC)
HOUR = {"since": START, "until": START + timedelta(hours=1)}
MISS = {"ttft_met": False, "attained": False, "goodput_tokens": 0}
DEFAULTS = [{"kind": "slo", "reason": "defaults"}, {"kind": "dispatch", "reason": "fits"}]


def call(workflow, after_s, took_s=1.0, left_s=None, last=None, **fields):
    """A request of a workflow with 100 tokens in and 20 out. `left_s`: until the workflow was due, at its arrival."""
    step = {"kind": "workflow", "reason": "workflow_inherited", "at": 0.0, "figures": {"left_s": left_s}}
    decisions = ([step] if left_s is not None else []) + ([last] if last else [])
    at = factories.NOON + after_s
    return factories.record(workflow=workflow, arrived_at=at, e2e_s=took_s, decisions=decisions, **fields)


def cancelled(workflow, after_s, by="tenant", began_s=0.0, left_s=60.0):
    """`left_s`: until it was due, from its beginning."""
    began_at, at = factories.NOON + began_s, factories.NOON + after_s
    return WorkflowCancellation("acme", workflow, by, began_at, began_at + left_s, at)


def counted(*records, **query):
    factories.records_stored(*records)
    return {
        row.type: (row.finished, row.in_time, row.cancelled, row.tokens, row.goodput_tokens)
        for row in goodput(**{**HOUR, **query})
    }


def test_each_type_counts_its_own_tokens():
    deadline = {"target_deadline_s": 10.0, "decisions": [{"kind": "slo", "reason": "explicit"}]}
    assert counted(
        factories.record(goodput_tokens=18), factories.record(**MISS),
        factories.record(outcome="cancelled", **MISS),
        factories.record(**deadline, goodput_tokens=120), factories.record(**deadline, deadline_met=False, **MISS),
        factories.record(slo_class="", decisions=DEFAULTS),
    ) == {
        "latency": (2, 1, 1, 40, 18), "deadline": (2, 1, 0, 240, 120), "best_effort": (1, 1, 0, 20, 20),
    }  # fmt: skip


def test_a_workflow_counts_once_all_or_nothing():
    late = {"took_s": 7.5, "left_s": 5}
    assert counted(
        call("kept", 0, left_s=60, target_deadline_s=30.0), call("kept", 10, left_s=50, **MISS),
        call("late", 0, left_s=10), call("late", 5, **late),
        call("broke", 0, left_s=60), call("broke", 1, left_s=59, outcome="failed", **MISS),
        call("runs", 0, left_s=7200),
    ) == {"compound": (3, 1, 0, 240 + 240 + 120, 240)}  # fmt: skip


def test_who_cancelled_a_workflow_decides_whether_it_counts():
    def ended(reason):
        return {"last": {"kind": "cancel", "reason": reason}, "outcome": "cancelled", **MISS}

    assert counted(
        call("mine", 0, left_s=60), call("mine", 1, left_s=59, **ended("workflow_cancelled")),
        call("theirs", 0, left_s=60), call("theirs", 1, left_s=59, **ended("workflow_cancelled_by_operator")),
    ) == {"compound": (1, 0, 1, 120, 0)}  # fmt: skip


def test_a_workflow_that_is_cancelled_while_nothing_of_it_runs_was_given_up():
    """It was in time: no record said that it was cancelled."""
    assert counted(
        call("mine", 0, left_s=60), cancelled("mine", 5), call("theirs", 0, left_s=60),
        cancelled("theirs", 5, "operator"), call("kept", 0, left_s=60),
    ) == {"compound": (2, 1, 1, 240, 120)}  # fmt: skip


def test_it_ends_when_it_is_cancelled():
    factories.records_stored(call("w", 0, left_s=600), cancelled("w", 90, "operator", left_s=600))
    rows = goodput(**HOUR, by=("minute", "type"))
    assert [(row.minute - START, row.finished, row.in_time) for row in rows] == [(timedelta(minutes=1), 1, 0)]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_what_comes_first_and_how_often_changes_nothing(order):
    told = call("w", 1, left_s=59), cancelled("w", 5), call("w", 2, left_s=58, slo_class="batch")
    for each in (*order, *order):
        factories.records_stored(told[each])
    row = WorkflowResult.objects.get()
    assert (row.requests, row.tokens, row.slo_class, row.excluded) == (2, 240, "interactive", True)
    times = (row.began_at, row.ended_at, row.cancelled_at, row.ends_at)
    assert [(at - START).total_seconds() for at in times] == [1, 3, 5, 5]


def test_who_cancelled_first_decides():
    ended = {"kind": "cancel", "reason": "workflow_cancelled", "at": 6.0}
    for name, *later in (("a", cancelled("a", 9)), ("b", call("b", 0, left_s=60, last=ended)), ("c",)):
        factories.records_stored(*later)
        factories.records_stored(call(name, 0, left_s=60), cancelled(name, 5, "operator"))
        factories.records_stored(cancelled(name, 9), *later)
    assert counted() == {"compound": (3, 0, 0, 480, 0)}
    assert set(WorkflowResult.objects.values_list("cancelled_by", flat=True)) == {"operator"}


def test_cancelling_it_after_its_deadline_changes_nothing():
    hung_up = {"outcome": "cancelled", "error_code": "cancelled", **MISS}
    ended = {"kind": "cancel", "reason": "workflow_cancelled", "at": 65.0}
    before = counted(call("kept", 0, left_s=60), call("late", 0, left_s=60, took_s=70))
    assert before == {"compound": (2, 1, 0, 240, 120)}
    assert counted(*(cancelled(name, 60.5) for name in ("kept", "late", "unknown"))) == before
    assert counted(call("runs", 0, left_s=60, took_s=65, last=ended, **hung_up)) == {"compound": (3, 1, 0, 240, 120)}
    assert not WorkflowResult.objects.filter(workflow="unknown").exists()
    factories.records_stored(cancelled("sooner", 50, left_s=100))
    assert counted(call("sooner", 0, left_s=40)) == {"compound": (4, 2, 0, 360, 240)}, "a request was told an earlier"


def test_one_that_was_cancelled_before_its_first_request_counts_as_who_cancelled_it_has_it():
    """Its row has no request. Those that were under way then are added to it."""
    assert counted(cancelled("mine", 5), cancelled("theirs", 5, "operator")) == {"compound": (1, 0, 1, 0, 0)}
    last = {"kind": "cancel", "reason": "workflow_cancelled", "at": 4.1}
    late = call("mine", 1, took_s=4.1, left_s=59, last=last, outcome="cancelled", slo_class="batch", **MISS)
    assert counted(late) == {"compound": (1, 0, 1, 0, 0)}
    row = WorkflowResult.objects.get(workflow="mine")
    assert (row.requests, row.slo_class, row.began_at) == (1, "batch", START + timedelta(seconds=1))


def test_a_name_is_another_workflows_an_hour_after_it_was_cancelled():
    """The second one was added to the first, which was not due yet, and did not count."""
    factories.records_stored(call("nightly", 0, left_s=36_000), cancelled("nightly", 10, left_s=36_000))
    factories.records_stored(call("nightly", 5_000, left_s=60))
    again = cancelled("nightly", 10, left_s=36_000)
    assert counted(again, until=START + timedelta(hours=2)) == {"compound": (1, 1, 1, 120, 120)}
    latest = WorkflowResult.objects.get(latest=True)
    assert (latest.cancelled_by, latest.requests) == ("", 1)
    factories.records_stored(cancelled("nightly", 20_010, began_s=20_000))
    assert WorkflowResult.objects.filter(workflow="nightly").count() == 3


def test_rows_of_releases_that_did_not_know_when_it_was_cancelled_keep_their_results():
    figures = {"tenant": "acme", "requests": 1, "failed": 1, "missed": 0, "cancelled": 1, "tokens": 0}
    times = {"began_at": START, "ended_at": START + timedelta(seconds=5), "due_at": START + timedelta(seconds=60)}
    for by in ("tenant", "operator", ""):
        WorkflowResult.objects.create(workflow=f"by-{by}", cancelled_by=by, **figures, **times)
    rows = {row.cancelled_by: row for row in WorkflowResult.objects.all()}
    assert {by: (row.excluded, row.in_time) for by, row in rows.items()} == {
        "tenant": (True, False), "operator": (False, False), "": (False, False),
    }  # fmt: skip
    assert {by: (row.ends_at - START).seconds for by, row in rows.items()} == {"tenant": 5, "operator": 5, "": 60}


def test_a_step_that_its_client_gave_up_is_no_failure_of_its_workflow():
    hung_up = {"outcome": "cancelled", "error_code": "client_closed", **MISS}
    assert counted(
        call("resumed", 0, left_s=60, step_key="plan", **hung_up), call("resumed", 9, left_s=51, step_key="plan"),
        call("unnamed", 0, left_s=60, **hung_up), call("unnamed", 9, left_s=51),
    ) == {"compound": (2, 1, 0, 240, 120)}  # fmt: skip


def test_an_answer_that_another_request_got_counts_once():
    assert counted(
        call("w", 0, left_s=60), call("w", 9, left_s=51, attempts=0), call("w", 9, left_s=51, attempts=0)
    ) == {"compound": (1, 1, 0, 120, 120)}


def test_without_a_deadline_each_request_of_a_workflow_has_to_be_in_time():
    assert counted(
        call("kept", 0), call("kept", 5), call("missed", 0), call("missed", 5, **MISS),
        call("hung-up", 0, outcome="cancelled", **MISS),
    ) == {"compound": (2, 1, 1, 480, 240)}  # fmt: skip


def test_a_workflow_counts_in_the_minute_in_which_it_ends_and_not_in_two_windows():
    factories.records_stored(call("long", 30, left_s=100), call("long", 90, left_s=40))
    rows = goodput(**HOUR, by=("minute", "type"))
    assert [(row.minute - START, row.finished) for row in rows] == [(timedelta(minutes=2), 1)]
    assert goodput(since=START, until=START + timedelta(minutes=2)) == []


def test_a_workflow_of_many_hours_is_one():
    """Read from its records it was two: the hours before the window were not looked at."""
    factories.records_stored(call("long", -10_000, left_s=10_010, outcome="failed", **MISS))
    assert counted(call("long", 5, left_s=5)) == {"compound": (1, 0, 0, 120, 0)}


def test_a_late_record_turns_what_was_counted():
    assert counted(call("w", 0, left_s=60)) == {"compound": (1, 1, 0, 120, 120)}
    late = call("w", 30, left_s=30, took_s=45.0)
    assert counted(late, late) == {"compound": (1, 0, 0, 240, 0)}
    assert counted(late) == {"compound": (1, 0, 0, 240, 0)}


def test_a_record_of_a_minute_long_over_still_counts_once():
    first, late = factories.record(), factories.record()
    assert counted(first) == {"latency": (1, 1, 0, 20, 20)}
    assert counted(first, late) == counted(late) == {"latency": (2, 2, 0, 40, 40)}


def test_a_name_used_again_later_is_another_workflow():
    factories.records_stored(call("nightly", 0, left_s=60, outcome="failed", **MISS))
    factories.records_stored(call("nightly", 86_400, left_s=60))
    assert counted(until=START + timedelta(days=2)) == {"compound": (2, 1, 0, 120, 120)}


def test_a_late_record_does_not_change_the_workflow_that_took_its_name():
    factories.records_stored(call("nightly", 86_400, left_s=60))
    factories.records_stored(call("nightly", 0, left_s=60, outcome="failed", **MISS))
    assert counted(until=START + timedelta(days=2)) == {"compound": (2, 1, 0, 120, 120)}
    latest = WorkflowResult.objects.get(latest=True)
    assert (latest.began_at, latest.requests, latest.failed) == (START + timedelta(days=1), 1, 0)


def test_a_late_record_whose_deadline_is_not_over_belongs_to_the_workflow():
    factories.records_stored(call("long", 7_200, left_s=800))
    assert counted(call("long", 0, left_s=8_000), until=START + timedelta(hours=3)) == {"compound": (1, 1, 0, 240, 240)}


def test_refusals_of_workflows_that_are_not_named_count_for_no_workflow_and_no_other_type():
    unnamed = {"kind": "workflow", "reason": NOT_NAMED, "figures": {"workflows": 4}}
    refused = {"outcome": "refused", "attempts": 0, "stands_for": 9, **MISS}
    assert counted(call("", 0, target_deadline_s=5.0, last=unnamed, **refused), call("w", 0, left_s=60)) == {
        "compound": (1, 1, 0, 120, 120)
    }
    found = {kind: RequestRecord.objects.filter(of_type(kind)).count() for kind in RequestType}
    assert {kind: count for kind, count in found.items() if count} == {RequestType.COMPOUND: 2}


def test_late_records_of_a_workflow_that_lost_its_name_are_one_row_however_they_come():
    """Each batch made a row of its own, so one old workflow counted once for every late record."""
    factories.records_stored(call("nightly", 86_400, left_s=60))
    for after_s in (20, 0, 10):
        factories.records_stored(call("nightly", after_s, left_s=60 - after_s))
    factories.records_stored(call("nightly", 30, left_s=30, outcome="failed", **MISS))
    rows = WorkflowResult.objects.order_by("began_at").values_list("requests", "failed", "latest", "in_time")
    assert list(rows) == [(4, 1, False, False), (1, 0, True, True)]
    assert WorkflowResult.objects.first().began_at == START + timedelta(days=1)
    assert WorkflowResult.objects.last().began_at == START


def test_a_late_record_joins_the_row_that_was_left_when_its_name_was_used_again():
    for day in (0, 1, 2):
        factories.records_stored(call("nightly", day * 86_400, left_s=60))
    factories.records_stored(call("nightly", 86_400 + 5, left_s=55))
    rows = WorkflowResult.objects.order_by("began_at").values_list("requests", "latest")
    assert list(rows) == [(1, False), (2, False), (1, True)]


@pytest.mark.django_db(transaction=True)
def test_writers_of_the_same_workflows_wait_for_each_other_and_never_deadlock():
    """Names that are used again were marked before any was counted: out of order, so that each writer could wait for
    the other."""
    day = 86_400.0
    factories.records_stored(call("a", day), call("b", 0))
    with records_connection() as first, records_connection() as second, ThreadPoolExecutor(1) as pool:
        with first.transaction(), first.cursor() as cursor:
            goodput_write(cursor, [call("a", day + 1)])
            other = pool.submit(records_write, connection=second, records=[call("a", day + 2), call("b", day)])
            until(lambda: blocked(second.info.backend_pid), 5.0)
            goodput_write(cursor, [call("b", 1)])
        assert other.result(timeout=10.0) == 2
    rows = WorkflowResult.objects.order_by("workflow", "began_at").values_list("workflow", "requests", "latest")
    assert list(rows) == [("a", 3, True), ("b", 2, False), ("b", 1, True)]


def blocked(pid: int) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [pid])
        return bool(cursor.fetchone()[0])


def test_minutes_are_gathered_into_buckets():
    factories.records_stored(
        factories.record(), factories.record(arrived_at=factories.NOON + 250), call("w", 0, 1, 500)
    )
    rows = goodput(**HOUR, by=("minute",), bucket=timedelta(minutes=5))
    assert [((row.minute - START).seconds, row.finished) for row in rows] == [(0, 2), (300, 1)]
    with pytest.raises(ValueError, match="bucket"):
        goodput(**HOUR, bucket=timedelta(seconds=90))


def test_groups_add_up_and_a_tenant_sees_its_own(django_assert_num_queries):
    factories.records_stored(
        factories.record(), factories.record(tenant="globex"), call("a", 0, left_s=9, tenant="globex"),
        call("a", 0, left_s=9),
        factories.record(outcome="refused", stands_for=40, tenant="globex", **MISS),
    )  # fmt: skip
    with django_assert_num_queries(1):
        rows = goodput(**HOUR, by=("tenant", "type", "slo_class"))
    assert [(row.tenant, row.type, row.finished) for row in rows] == [
        ("acme", "compound", 1), ("acme", "latency", 1), ("globex", "compound", 1), ("globex", "latency", 41),
    ]  # fmt: skip
    assert {row.type: row.share for row in goodput(**HOUR, tenant="globex")} == {"compound": 1.0, "latency": 1 / 41}


def test_an_unknown_group_is_refused():
    with pytest.raises(ValueError, match="by: one or more of minute, type, tenant, slo_class"):
        goodput(**HOUR, by=("id",))


def test_the_migration_counts_the_last_hour_as_gateways_do():
    now = time.time()
    ended = {"last": {"kind": "cancel", "reason": "workflow_cancelled"}, "outcome": "cancelled", **MISS}
    factories.records_stored(
        factories.record(arrived_at=now - 60, goodput_tokens=18),
        factories.record(arrived_at=now - 60, slo_class="", decisions=DEFAULTS),
        factories.record(arrived_at=now - 90, target_deadline_s=9.0, goodput_tokens=120),
        factories.record(arrived_at=now - 90, outcome="refused", stands_for=40, output_tokens=0, **MISS),
        factories.record(arrived_at=now - 90, outcome="cancelled", **MISS),
        *(call(name, now - factories.NOON - 50, left_s=9) for name in ("kept", "broke", "mine")),
        call("broke", now - factories.NOON - 45, left_s=4, outcome="failed", **MISS),
        call("mine", now - factories.NOON - 45, left_s=4, **ended),
        call("free", now - factories.NOON - 45),
    )  # fmt: skip
    seen = {"since": datetime.fromtimestamp(now - 600, UTC), "until": datetime.fromtimestamp(now, UTC), "by": GROUPS}
    by_gateways = goodput(**seen)
    migration = import_module("controller.migrations.0040_goodput_by_minute")
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM goodput_minute; DELETE FROM workflow_result")
        cursor.execute(migration.MINUTES)
        cursor.execute(migration.WORKFLOWS)
    assert goodput(**seen) == by_gateways
    assert {row.type: row.finished for row in goodput(**{**seen, "by": ("type",)})} == {
        "best_effort": 1, "compound": 3, "deadline": 1, "latency": 41,
    }  # fmt: skip
