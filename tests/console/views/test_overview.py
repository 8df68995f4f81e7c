"""Overview: live rows joined with the hour and the day, and what is said when something is away."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
from django.utils import timezone

from console.live.ttl_cache import TtlCache
from console.panels.history import error_budget
from console.views.site import metrics
from controller.models import AttainmentMinute, InstanceInterval, histogram
from tests import factories
from tests.console.live.live_data import fleet, window


def minute(ago, **fields):
    empty = [0] * histogram.SIZE
    counts = dict.fromkeys(
        ("ttft_met", "tpot_met", "refused", "expired", "failed", "cancelled", "prompt_tokens", "output_tokens"), 0
    )
    defaults = {
        "tenant": "acme", "slo_class": "chat", "model": "demo", "finished": 10, "attained": 9, "goodput_tokens": 600,
        "ttft_histogram": empty, "tpot_histogram": empty, "e2e_histogram": empty, **counts,
    }  # fmt: skip
    at = (timezone.now() - ago).replace(second=0, microsecond=0)
    return AttainmentMinute.objects.create(minute=at, **{**defaults, **fields})


def test_the_first_paint_names_who_misses_and_why(viewer, live_store):
    missing = window(attained=50, miss_reason="queued_too_long")
    live_store.fleets = [fleet(at=time.time(), classes=[missing])]
    html = viewer.get("/").content.decode()
    assert "1 of 1 class is missing its SLO" in html
    assert "waited in the queue past its TTFT target" in html
    assert "50 %" in html
    assert "/requests/?tenant=acme&amp;slo_class=chat&amp;attained=no" in html


def test_hour_and_day_come_from_the_minutes_with_the_budget(viewer, live_store):
    factories.slo_class(name="chat", ttft_s=0.5, target=0.9)
    minute(timedelta(minutes=5))
    minute(timedelta(hours=5), attained=10)
    (row,) = viewer.get("/overview/history/").json()["classes"]
    assert (row["hour"], row["day"], row["target"], row["ttft_target_s"]) == (0.9, 0.95, 0.9, 0.5)
    assert row["budget_text"] == "50 % left"


def test_a_tenants_own_class_decides_its_target(viewer, live_store):
    owner = factories.tenant(name="acme")
    factories.slo_class(name="chat", target=0.9)
    factories.slo_class(name="chat", target=0.99, tenant=owner)
    minute(timedelta(minutes=5))
    assert viewer.get("/overview/history/").json()["classes"][0]["target"] == 0.99


def test_a_mapped_priority_shows_the_target_its_level_begins_with(viewer, live_store):
    factories.priority_mapping(levels=[{**factories.LEVEL, "ttft_s": 0.7}, {**factories.LEVEL, "ttft_s": 0.9}])
    minute(timedelta(minutes=5), slo_class="priority-1")
    assert viewer.get("/overview/history/").json()["classes"][0]["ttft_target_s"] == 0.9


def provisioned(since_ago, until_ago=None, unit_cost=1.0):
    """An instance that is paid for from `since_ago` on, or was until `until_ago`."""
    now = timezone.now()
    return InstanceInterval.objects.create(
        instance=factories.instance(unit_cost=unit_cost), role="collocated", unit_cost=unit_cost,
        started_at=now - since_ago, ended_at=None if until_ago is None else now - until_ago,
    )  # fmt: skip


def test_the_cost_says_its_unit(viewer, live_store):
    tile = viewer.get("/").content.decode()
    assert "<dt>Cost, units per hour</dt>" in tile
    assert tile.index("= 3,600 s × unit costs") < tile.index(">last hour: "), "what the figure above it is"
    assert "instance-seconds × unit cost. The unit cost of an instance is 1 unit per second" in tile


def test_an_hour_costs_what_is_provisioned_now_however_short_a_time(viewer, live_store):
    """Two instances that were started ten seconds ago, and two hundred beside one that was there all the time."""
    for _ in range(2):
        provisioned(timedelta(seconds=10))
    assert viewer.get("/overview/history/").json()["cost_per_hour"] == 7200
    for _ in range(200):
        provisioned(timedelta(seconds=1))
    provisioned(timedelta(minutes=50), until_ago=timedelta(minutes=40), unit_cost=100.0)
    said = viewer.get("/overview/history/").json()
    assert (said["cost_per_hour"], said["cost_whose"]) == (202 * 3600, "202 instances provisioned")


def test_what_the_hour_cost_and_each_attained_request_are_of_one_window(viewer, live_store):
    provisioned(timedelta(minutes=20), unit_cost=2.0)
    provisioned(timedelta(minutes=30), until_ago=timedelta(minutes=20))
    provisioned(timedelta(hours=5), until_ago=timedelta(hours=2))
    minute(timedelta(minutes=15), attained=4)
    minute(timedelta(hours=2), attained=1000)
    said = viewer.get("/overview/history/").json()
    assert said["cost_spent"] == pytest.approx(20 * 60 * 2 + 10 * 60, abs=10)
    assert said["cost_per_attained"] == pytest.approx(said["cost_spent"] / 4)
    assert said["cost_per_hour"] == 7200


def test_the_tile_names_the_windows_of_its_figures(viewer, live_store):
    tile = cost_tile(viewer)
    assert "Cost, units per hour 0 no instance provisioned" in tile
    assert "last hour: 0 units, no request attained" in tile
    provisioned(timedelta(minutes=30), until_ago=timedelta(minutes=20), unit_cost=2.0)
    assert "last hour: 1,200 units, no request attained" in cost_tile(viewer)
    minute(timedelta(minutes=25), attained=600)
    assert "last hour: 1,200 units, 2 units per attained request" in cost_tile(viewer)
    provisioned(timedelta(0))
    assert "Cost, units per hour 3,600 1 instance provisioned" in cost_tile(viewer)


def cost_tile(viewer):
    html = viewer.get("/").content.decode()
    tile = re.search(r"<dt>Cost, units per hour</dt>.*?</dd>", html, re.DOTALL)[0]
    return " ".join(re.sub(r"<[^>]+>", " ", tile).split()).replace(" ,", ",")


@pytest.mark.parametrize(
    ("finished", "misses", "target", "text", "status"),
    [
        (0, 0, 0.95, "–", ""),
        (100, 0, 0.95, "100 % left", "ok"),
        (100, 4, 0.95, "20 % left", "warn"),
        (100, 10, 0.95, "2.0x the allowed misses", "bad"),
        (100, 0, 1.0, "100 % left", "ok"),
        (100, 1, 1.0, "no miss is allowed", "bad"),
    ],
)
def test_error_budget(finished, misses, target, text, status):
    budget = error_budget(finished, misses, target)
    assert (budget["budget_text"], budget["budget_status"]) == (text, status)
    assert 0 <= budget["budget_share"] <= 1


def test_old_live_figures_are_not_painted_as_current(viewer, live_store):
    live_store.fleets = [fleet(at=time.time() - 60, classes=[window(attained=1)])]
    html = viewer.get("/").content.decode()
    assert "No gateway is reporting" in html


def test_the_page_opens_without_redis(viewer, live_store):
    live_store.away = True
    answer = viewer.get("/")
    assert answer.status_code == 200
    assert b"No requests yet" in answer.content


def test_the_overview_stays_within_ten_queries(viewer, live_store, django_assert_max_num_queries):
    for number in range(30):
        factories.slo_class(name=f"class-{number}")
        minute(timedelta(minutes=number), slo_class=f"class-{number}")
    live_store.fleets = [fleet(at=time.time())]
    with django_assert_max_num_queries(10):
        answer = viewer.get("/")
    assert answer.status_code == 200
    assert b"class-29" in answer.content, "the page itself, not a way to it"


def test_metrics_count_the_decisions_of_each_gateway_by_class(client, db, live_store):
    said = {"tenant": "acme", "slo_class": "chat", "kind": "refuse", "reason": "queue_full"}
    decided = [{**said, "count": 2}, {**said, "count": 3}]
    live_store.fleets = [fleet(at=time.time(), gateway=f"gw-{at}", decisions=[one]) for at, one in enumerate(decided)]
    text = client.get("/metrics").content.decode()
    labels = 'kind="refuse",reason="queue_full",slo_class="chat",tenant="acme"'
    assert f'slackline_decisions_total{{gateway="gw-0",{labels}}} 2.0' in text
    assert f'slackline_decisions_total{{gateway="gw-1",{labels}}} 3.0' in text


@pytest.fixture(autouse=True)
def _uncached_figures(monkeypatch):
    monkeypatch.setattr(metrics, "PAGE", TtlCache(0.0))


def test_metrics_show_attainment_by_class_and_say_when_redis_is_away(client, db, live_store):
    live_store.fleets = [fleet(at=time.time())]
    text = client.get("/metrics").content.decode()
    assert 'slackline_attainment_ratio{slo_class="chat",tenant="acme"} 0.98' in text
    assert "slackline_live_available 1.0" in text
    live_store.away = True
    text = client.get("/metrics").content.decode()
    assert "slackline_live_available 0.0" in text
    assert "slackline_attainment_ratio{" not in text


def test_the_budget_is_told_for_now_the_hour_and_the_day(viewer, live_store):
    factories.slo_class(name="chat", target=0.9)
    live_store.fleets = [fleet(at=time.time(), classes=[window(finished=100, attained=95, target=0.9)])]
    minute(timedelta(minutes=5), finished=10, attained=8)
    minute(timedelta(hours=5), finished=90, attained=90)
    answer = viewer.get("/")
    (row,) = answer.context["rows"]
    budgets = row["now_budget"], row["hour_budget"], row["budget_text"]
    assert budgets == ("50 % left", "2.0x the allowed misses", "80 % left")
    html = answer.content.decode()
    assert '<span class="sub" data-cell="now-budget">50 % left</span>' in html
    assert '<span class="sub" data-cell="hour-budget">2.0x the allowed misses</span>' in html


def test_a_row_and_the_headline_lead_to_the_misses_and_the_queue(viewer, live_store):
    factories.instance(id="engine-1")
    live_store.fleets = [fleet(at=time.time(), classes=[window(attained=50, slo_class="a b", tenant="acme")])]
    html = viewer.get("/").content.decode()
    summary = html[html.index("data-summary-lines") : html.index("</section>")]
    assert 'href="/requests/?tenant=acme&amp;slo_class=a+b&amp;attained=no">' in summary
    assert 'href="/queue/?key=acme%2Fa+b"' in html
    assert 'href="/fleet/instances/engine-1/"' in html


def test_a_class_without_traffic_has_no_budget_to_tell(viewer, live_store):
    live_store.fleets = [fleet(at=time.time(), classes=[window(finished=0, attained=0)])]
    (row,) = viewer.get("/").context["rows"]
    assert (row["now_budget"], row.get("hour_budget")) == ("", None)
