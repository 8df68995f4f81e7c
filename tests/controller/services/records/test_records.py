"""Records are stored exactly once, with their roll-up, whatever is in them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

import pytest
from django.db import connection

from controller.core.types import RECORD_FIELDS
from controller.models import AttainmentMinute, GoodputMinute, RequestRecord, WorkflowResult, histogram
from controller.selectors.partitions import partitions
from controller.services.records.partitions import partitions_ensure, records_retain, rollup_retain, workflows_retain
from controller.services.records.requests import records_connection, records_write
from tests import factories
from workers.tasks.records import drop_old_records

pytestmark = pytest.mark.django_db


def test_the_columns_are_the_contracts_fields_in_order():
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM request_record LIMIT 0")
        assert tuple(column.name for column in cursor.description) == RECORD_FIELDS
    assert tuple(field.column for field in RequestRecord._meta.concrete_fields) == RECORD_FIELDS


def test_a_batch_is_stored_as_it_was():
    record = factories.record(
        priority=2, target_deadline_s=9.0, queue_s=None, prefill_instance="engine-2", refined_bounds=[50, 60, 90]
    )

    assert factories.records_stored(record) == 1

    stored = RequestRecord.objects.get(id=record.id)
    assert stored.arrived_at == datetime.fromtimestamp(record.arrived_at, UTC)
    for name in set(RECORD_FIELDS) - {"arrived_at"}:
        assert getattr(stored, name) == getattr(record, name), name


def test_a_batch_sent_again_changes_nothing():
    batch = [factories.record(), factories.record()]

    assert [factories.records_stored(*batch), factories.records_stored(*batch)] == [2, 0]

    assert RequestRecord.objects.count() == 2
    assert AttainmentMinute.objects.get().finished == 2


def test_of_a_batch_that_overlaps_only_the_new_ones_count():
    first, second, third = factories.record(), factories.record(), factories.record()
    factories.records_stored(first, second)

    assert factories.records_stored(second, third, third) == 1

    assert AttainmentMinute.objects.get().finished == 3


def test_the_roll_up_counts_each_outcome_once():
    missed = {"ttft_met": False, "attained": False, "goodput_tokens": 0}
    factories.records_stored(
        factories.record(),
        factories.record(ttft_s=3.0, **missed),
        factories.record(outcome="refused", ttft_s=None, tpot_s=None, output_tokens=0, tpot_met=False, **missed),
        factories.record(outcome="expired", ttft_s=None, tpot_s=None, output_tokens=0, tpot_met=False, **missed),
        factories.record(outcome="cut", tpot_met=False, **missed),
        factories.record(outcome="cancelled", **missed),
        factories.record(outcome="refused", error_code="engine_rejected", **missed),
    )

    minute = AttainmentMinute.objects.get()

    counts = {name: getattr(minute, name) for name in ("finished", "attained", "ttft_met", "tpot_met")}
    assert counts == {"finished": 5, "attained": 1, "ttft_met": 1, "tpot_met": 2}
    assert (minute.refused, minute.expired, minute.failed, minute.cancelled) == (1, 1, 1, 2)
    assert minute.goodput_tokens == 20
    assert sum(minute.ttft_histogram) == 3
    assert minute.ttft_histogram[histogram.bucket(3.0)] == 1


def test_the_roll_up_adds_to_what_is_there_and_separates_its_keys():
    factories.records_stored(factories.record())
    factories.records_stored(
        factories.record(), factories.record(tenant="globex"), factories.record(arrived_at=factories.NOON + 60)
    )

    rows = {(row.minute.minute, row.tenant): row for row in AttainmentMinute.objects.all()}

    assert {key: row.finished for key, row in rows.items()} == {(0, "acme"): 2, (0, "globex"): 1, (1, "acme"): 1}
    assert rows[0, "acme"].ttft_histogram[histogram.bucket(0.2)] == 2


def test_values_postgresql_cannot_hold_do_not_cost_the_batch():
    bad = factories.record(
        workflow="a\x00b" + "x" * 300,
        stage="\ud800",
        priority=10**12,
        decisions=[{"reason": "nul \x00 and \ud800", "figure": float("nan")}],
    )

    assert factories.records_stored(bad, factories.record()) == 2

    stored = RequestRecord.objects.get(id=bad.id)
    assert stored.workflow == "ab" + "x" * 118
    assert (stored.stage, stored.priority) == ("?", 2**31 - 1)
    assert stored.decisions == [{"reason": "nul  and ?", "figure": None}]


def test_the_writer_makes_the_partition_of_a_day_that_has_none():
    day = date(2031, 5, 4)
    assert day not in partitions()

    factories.records_stored(factories.record(arrived_at=datetime(2031, 5, 4, 23, 59, 59, tzinfo=UTC).timestamp()))

    assert day in partitions()


def test_partitions_are_made_ahead_once():
    today = date(2032, 2, 27)

    assert partitions_ensure(days=3, today=today) == [today, date(2032, 2, 28), date(2032, 2, 29), date(2032, 3, 1)]
    assert partitions_ensure(days=3, today=today) == []


def test_retention_drops_whole_days_and_keeps_the_roll_up():
    old = factories.record(arrived_at=datetime(2020, 1, 1, 12, tzinfo=UTC).timestamp())
    kept = factories.record(arrived_at=datetime(2020, 1, 5, 0, tzinfo=UTC).timestamp())
    factories.records_stored(old, kept)

    dropped = records_retain(days=3, today=date(2020, 1, 8))

    assert dropped == [date(2020, 1, 1)]
    assert [row.id for row in RequestRecord.objects.all()] == [kept.id]
    assert AttainmentMinute.objects.count() == 2


def test_an_empty_batch_asks_nothing(django_assert_num_queries):
    with django_assert_num_queries(0):
        assert records_write(connection=connection.connection, records=[]) == 0


@pytest.mark.django_db(transaction=True)
def test_a_writer_with_its_own_connection_stores_all_or_nothing():
    good, wrong = factories.record(), replace(factories.record(), http_status="many")
    with records_connection(patience_s=5.0) as own:
        with pytest.raises(Exception, match="many"):
            records_write(connection=own, records=[good, wrong])
        assert RequestRecord.objects.count() == 0

        assert records_write(connection=own, records=[good]) == 1
    assert RequestRecord.objects.get().id == good.id
    assert AttainmentMinute.objects.get().finished == 1


def test_the_roll_up_is_trimmed_by_days_and_keeps_the_rest():
    for day in (1, 2, 5, 9):
        at = datetime(2026, 10, day, 12, tzinfo=UTC).timestamp()
        factories.records_stored(
            factories.record(arrived_at=at), factories.record(arrived_at=at + 60),
            factories.record(arrived_at=at, workflow=f"of-{day}"),
        )  # fmt: skip

    assert rollup_retain(days=5, today=date(2026, 10, 10)) == 8
    assert rollup_retain(days=5, today=date(2026, 10, 10)) == 0
    left = sorted(AttainmentMinute.objects.values_list("minute__day", flat=True))
    assert left == [5, 5, 9, 9]
    assert sorted(GoodputMinute.objects.values_list("minute__day", flat=True)) == left
    assert WorkflowResult.objects.count() == 4
    with pytest.raises(ValueError, match="days"):
        rollup_retain(days=0)


def test_results_of_workflows_are_kept_as_long_as_their_requests(settings):
    """Clients choose the names, and each is a row: for 400 days they would be more than the requests."""
    settings.RECORDS_KEPT_DAYS, settings.ROLLUP_KEPT_DAYS = 5, 400
    noon = datetime.now(UTC).replace(hour=12)
    for ago in (1, 5, 6, 9):
        at = (noon - timedelta(days=ago)).timestamp()
        factories.records_stored(factories.record(arrived_at=at), factories.record(arrived_at=at, workflow=f"of-{ago}"))

    drop_old_records()

    assert sorted(WorkflowResult.objects.values_list("workflow", flat=True)) == ["of-1", "of-5"]
    assert GoodputMinute.objects.count() == 4
    assert workflows_retain(days=5) == 0
    with pytest.raises(ValueError, match="days"):
        workflows_retain(days=0)


def test_a_record_that_stands_for_several_refusals_counts_as_all_of_them():
    refused = {"outcome": "refused", "attempts": 0, "ttft_s": None, "tpot_s": None, "e2e_s": 0.001, "output_tokens": 0}
    missed = {"ttft_met": False, "tpot_met": False, "attained": False, "goodput_tokens": 0}
    last = factories.NOON + 0.9
    group = {"stands_for": 137, "last_arrived_at": last, "all_prompt_tokens": 1_400, "prompt_tokens": 10}
    one, several = (
        factories.record(**refused, **missed, prompt_tokens=10),
        factories.record(**refused, **missed, **group),
    )

    assert factories.records_stored(factories.record(), one, several) == 3
    assert factories.records_stored(several) == 0, "sent again"

    minute = AttainmentMinute.objects.get()
    assert (minute.finished, minute.attained, minute.refused) == (139, 1, 138)
    assert minute.prompt_tokens == 100 + 10 + 1_400
    assert (minute.output_tokens, minute.goodput_tokens) == (20, 20)
    stored = RequestRecord.objects.get(id=several.id)
    assert (stored.stands_for, stored.all_prompt_tokens) == (137, 1_400)
    assert stored.last_arrived_at == datetime.fromtimestamp(last, UTC)
