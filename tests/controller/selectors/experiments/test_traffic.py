"""Recorded traffic for a replay: which stretch of a window, and what a record cannot tell."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from controller.core.errors import ConfigError
from controller.core.types import Targets
from controller.selectors.experiments import traffic
from controller.selectors.experiments.fleet_model import default_model, fleet_today, size_of
from tests import experiment_data as data
from tests import factories

pytestmark = pytest.mark.django_db

NOON = datetime.fromtimestamp(factories.NOON, UTC)


def window(hours=1.0, **fields):
    return traffic.RecordedWindow(NOON, NOON + timedelta(hours=hours), "demo", **fields)


def minutes(*counts):
    """So many requests in each minute after noon."""
    for minute, count in enumerate(counts):
        if count:
            data.traffic(count, ending=factories.NOON + 60 * minute + 30, every_s=0.01)


def test_a_window_that_fits_is_replayed_whole():
    minutes(5, 0, 5)
    assert traffic.busiest(window(), limit=10) == traffic.Stretch(NOON, NOON + timedelta(hours=1), 10, 10)


def test_of_a_larger_one_its_busiest_stretch():
    minutes(2, 2, 9, 10, 2, 2)
    found = traffic.busiest(window(), limit=20)
    assert (found.since, found.until) == (NOON + timedelta(minutes=2), NOON + timedelta(minutes=4))
    assert (found.requests, found.of, found.cut) == (19, 27, True)
    assert len(traffic.arrivals(traffic.RecordedWindow(found.since, found.until, "demo"))) == 19


def test_a_minute_beyond_the_limit_is_cut_to_it():
    minutes(30)
    assert traffic.busiest(window(), limit=20).requests == 20
    assert len(traffic.arrivals(window(), limit=20)) == 20


def test_nothing_on_record_is_nothing():
    assert traffic.busiest(window()).of == 0
    assert traffic.arrivals(window()) == []
    assert traffic.busiest_model(NOON, NOON + timedelta(hours=1)) is None


def test_arrivals_tell_what_was_asked_for():
    data.traffic(
        6,
        ending=factories.NOON + 60,
        every_s=2.0,
        tenant=lambda n: "acme" if n % 2 else "demo",
        outcome=["ok", "ok", "refused", "cancelled", "cancelled", "cut"].__getitem__,
        output_tokens=[10, 30, 0, 0, 7, 12].__getitem__,
        error_code=lambda n: "",
        target_deadline_s=9.0,
    )
    found = traffic.arrivals(window())
    assert [each.at for each in found] == pytest.approx([0, 2, 4, 8, 10])
    assert [each.output_tokens for each in found] == [10, 30, 20, 7, 20]  # the median answer where none was seen
    assert [each.estimated for each in found] == [False, False, True, False, True]
    assert found[0].targets == Targets(1.0, 0.1, 9.0, 5.0)
    assert [each.at for each in traffic.arrivals(window(), limit=2, newest=True)] == pytest.approx([0, 2])
    assert len(traffic.arrivals(window(tenant="acme"))) == 2


def test_refusals_recorded_as_one_are_replayed_one_by_one():
    refused = {"outcome": "refused", "attained": False, "output_tokens": 0, "attempts": 0}
    group = {"stands_for": 5, "last_arrived_at": factories.NOON + 0.8, "all_prompt_tokens": 500, "prompt_tokens": 7}
    between = factories.record(arrived_at=factories.NOON + 0.5)
    factories.records_stored(factories.record(**refused, **group), between)
    found = traffic.arrivals(window())
    assert [each.at for each in found] == pytest.approx([0, 0.2, 0.4, 0.5, 0.6, 0.8])
    assert [each.prompt_tokens for each in found] == [100] * 6
    assert [each.estimated for each in found] == [True, True, True, False, True, True]
    assert traffic.busiest(window()).requests == len(found), "as the roll-up counts them"
    assert [each.at for each in traffic.arrivals(window(), limit=2)] == pytest.approx([0, 0.2])
    assert [each.at for each in traffic.arrivals(window(), limit=2, newest=True)] == pytest.approx([0, 0.2])


def test_todays_fleet_is_grouped_and_grown():
    data.fleet(instances=3)
    assert default_model() == "demo"
    [group] = fleet_today("demo")
    assert (group["count"], group["profile"], group["batching"]) == (3, data.SPEED, "chunked_prefill")
    assert size_of(fleet_today("demo", 2)) == 5
    assert size_of(fleet_today("demo", -2)) == 1
    with pytest.raises(ConfigError, match="would leave 0") as caught:
        fleet_today("demo", -3)
    assert caught.value.field == "instances.change"


def test_an_instance_no_one_measured_is_named():
    row = factories.instance(factories.served_model(name="demo"), device_kind="b200")
    with pytest.raises(ConfigError, match=rf"{row.id} \(b200, tp 1\) has no latency profile"):
        fleet_today("demo")
