"""Attainment by window and group: roll-up and records agree, shares and latencies are right."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from controller.selectors.records.attainment import attainment, attainment_series
from controller.services.records.requests import records_write
from tests import factories

pytestmark = pytest.mark.django_db
START = datetime.fromtimestamp(factories.NOON, UTC)
HOUR = {"since": START, "until": START + timedelta(hours=1)}
MISS = {"ttft_met": False, "attained": False, "goodput_tokens": 0}


@pytest.fixture
def traffic() -> None:
    records = [
        factories.record(ttft_s=0.1),
        factories.record(ttft_s=0.3, arrived_at=factories.NOON + 70),
        factories.record(ttft_s=2.5, arrived_at=factories.NOON + 130, **MISS),
        factories.record(outcome="cancelled", **MISS),
        factories.record(tenant="globex", slo_class="batch"),
        factories.record(slo_class="batch", outcome="refused", ttft_s=None, tpot_s=None, e2e_s=None, **MISS),
        factories.record(arrived_at=factories.NOON + 7200),
    ]
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    records_write(connection=connection.connection, records=records)


def test_shares_and_latencies_by_tenant_and_class(traffic, django_assert_num_queries):
    with django_assert_num_queries(4):
        rows = {(row.tenant, row.slo_class): row for row in attainment(**HOUR)}

    row = rows["acme", "interactive"]
    assert (row.finished, row.attained, row.cancelled) == (3, 2, 1)
    assert (row.share, row.ttft_share, row.tpot_share) == (2 / 3, 2 / 3, 1.0)
    assert row.ttft_s[0.5] == pytest.approx(0.3, abs=0.1)
    assert row.ttft_s[0.99] == pytest.approx(2.5, abs=0.5)
    assert rows["acme", "batch"].refused == 1
    assert rows["acme", "batch"].ttft_s[0.5] is None
    assert (row.first_tokens, rows["acme", "batch"].first_tokens) == (3, 0)
    assert rows["globex", "batch"].share == 1.0


def test_a_tenant_sees_its_own(traffic):
    assert [row.slo_class for row in attainment(**HOUR, tenant="globex")] == ["batch"]
    assert attainment(**HOUR, tenant="nobody") == []


def test_a_series_has_buckets_in_order(traffic, django_assert_num_queries):
    with django_assert_num_queries(1):
        rows = attainment_series(**HOUR, bucket=timedelta(minutes=2), slo_class="interactive")

    assert [(row.start - START, row.finished, row.attained) for row in rows] == [
        (timedelta(0), 2, 2),
        (timedelta(minutes=2), 1, 0),
    ]


@pytest.mark.parametrize("bucket", [timedelta(seconds=30), timedelta(seconds=90), timedelta(0)])
def test_a_bucket_is_whole_minutes(bucket):
    with pytest.raises(ValueError, match="minutes"):
        attainment_series(**HOUR, bucket=bucket)


def test_only_columns_of_the_roll_up_group():
    with pytest.raises(ValueError, match="tenant, slo_class, model"):
        attainment(**HOUR, by=("instance",))


def test_nothing_finished_has_no_share():
    assert attainment(**HOUR) == []
