"""Moments as people read and type them where they are: local on the page, UTC beside it and in all that is sent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.every_page.places import Places
from tests.browser.running.caller import Caller

pytestmark = [pytest.mark.browser, pytest.mark.long(85)]
Visit = Callable[..., Page]

NEW_YORK, KOLKATA = "America/New_York", "Asia/Kolkata"
ZONES = (NEW_YORK, KOLKATA)
SECOND = "%Y-%m-%dT%H:%M:%S"


def sent(page: Page, name: str) -> str:
    return parse_qs(urlsplit(page.url).query).get(name, [""])[0]


def whole(text: str) -> str:
    """A browser leaves seconds out where they are none."""
    return text if len(text) == 19 else f"{text}:00"


def shown(page: Page, name: str) -> str:
    return whole(page.locator(f"#id_{name}").input_value())


def row_of(page: Page, request_id: str) -> Locator:
    return page.locator("#request-rows tr").filter(has=page.locator(f'a[href="/requests/{request_id}/"]'))


def search(page: Page, expected: str) -> None:
    page.get_by_role("button", name="Search").click()
    page.wait_for_url(f"**since={expected.replace(':', '%3A')}*")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zone", ZONES)
def test_a_request_is_found_by_the_time_that_its_row_shows(visit: Visit, caller: Caller, places: Places, zone: str):
    arrived = datetime.fromisoformat(caller.get(f"requests/{places['request']}")["arrived_at"]).astimezone(UTC)
    first, last = (each.replace(microsecond=0) for each in (arrived, arrived + timedelta(seconds=1)))
    here = ZoneInfo(zone)
    page = visit("viewer", "/requests/", timezone_id=zone)
    page.get_by_label("Arrived after (your time)").fill(first.astimezone(here).strftime(SECOND))
    page.get_by_label("Arrived before (your time)").fill(last.astimezone(here).strftime(SECOND))
    expect(page.locator("#id_since_utc")).to_have_text(f"= {first:%Y-%m-%d %H:%M:%S} UTC")
    search(page, first.strftime(SECOND))
    assert sent(page, "until") == last.strftime(SECOND)
    row = row_of(page, places["request"])
    expect(row).to_have_count(1)
    said = row.locator("time").first
    expect(said).to_contain_text(first.astimezone(here).strftime("%H:%M:%S"))
    assert said.get_attribute("title") == f"{first:%Y-%m-%d %H:%M:%S} UTC"
    expect(page.get_by_label("Arrived after (your time)")).to_have_value(first.astimezone(here).strftime(SECOND))

    other = visit("viewer", urlsplit(page.url)._replace(scheme="", netloc="").geturl(), timezone_id=elsewhere(zone))
    assert shown(other, "since") == first.astimezone(ZoneInfo(elsewhere(zone))).strftime(SECOND)
    expect(row_of(other, places["request"])).to_have_count(1)


def elsewhere(zone: str) -> str:
    return KOLKATA if zone == NEW_YORK else NEW_YORK


@pytest.mark.parametrize(
    ("zone", "local", "utc"),
    [
        (NEW_YORK, "2026-03-08T01:59:59", "2026-03-08T06:59:59"),  # clocks go forward at two
        (NEW_YORK, "2026-03-08T03:00:00", "2026-03-08T07:00:00"),
        (NEW_YORK, "2026-11-01T00:59:59", "2026-11-01T04:59:59"),  # and back at two
        (NEW_YORK, "2026-11-01T02:00:00", "2026-11-01T07:00:00"),
        (KOLKATA, "2026-03-08T03:00:00", "2026-03-07T21:30:00"),
        (KOLKATA, "2026-11-01T02:00:00", "2026-10-31T20:30:00"),
    ],
)
@pytest.mark.sampled(2)
def test_clocks_that_change_are_reckoned_with(visit: Visit, zone: str, local: str, utc: str):
    page = visit("viewer", "/audit/", timezone_id=zone)
    page.get_by_label("After (your time)").fill(local)
    expect(page.locator("#id_since_utc")).to_have_text(f"= {utc.replace('T', ' ')} UTC")
    search(page, utc)
    page.reload()
    assert shown(page, "since") == local
    search(page, utc)


def test_of_an_hour_that_comes_twice_either_may_be_meant(visit: Visit):
    page = visit("viewer", "/requests/", timezone_id=NEW_YORK)
    field, note = page.get_by_label("Arrived after (your time)"), page.locator("#id_since_utc")
    field.fill("2026-11-01T01:30")
    expect(note).to_contain_text("= 2026-11-01 05:30:00 UTC, the first of two such times")
    note.get_by_role("button", name="Use the second").click()
    expect(note).to_contain_text("= 2026-11-01 06:30:00 UTC, the second of two such times")
    expect(field).to_be_focused()
    search(page, "2026-11-01T06:30:00")
    page.reload()
    expect(note).to_contain_text("the second of two")
    assert shown(page, "since") == "2026-11-01T01:30:00"
    search(page, "2026-11-01T06:30:00")  # what was not touched is sent as it came
    note.get_by_role("button", name="Use the first").click()
    search(page, "2026-11-01T05:30:00")


def test_an_hour_that_the_clocks_skip_is_said_to_be_none(visit: Visit):
    page = visit("viewer", "/requests/", timezone_id=NEW_YORK)
    page.get_by_label("Arrived after (your time)").fill("2026-03-08T02:30")
    expect(page.locator("#id_since_utc")).to_have_text("= 2026-03-08 07:30:00 UTC: clocks skip the entered time")
    page.get_by_label("Arrived after (your time)").fill("2026-03-08T03:30")
    expect(page.locator("#id_since_utc")).to_have_text("= 2026-03-08 07:30:00 UTC")
    page.get_by_label("Arrived after (your time)").fill("")
    expect(page.locator("#id_since_utc")).to_have_text("in America/New_York")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zone", ZONES)
def test_scaling_is_asked_about_a_moment_in_ones_own_time(visit: Visit, zone: str):
    page = visit("viewer", "/scaling/", timezone_id=zone)
    at = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=20)
    page.get_by_label("Time (your time)").fill(at.astimezone(ZoneInfo(zone)).strftime(SECOND))
    page.get_by_role("button", name="Show this time").click()
    page.wait_for_url("**at=*")
    assert sent(page, "at") == at.strftime(SECOND)
    assert shown(page, "at") == at.astimezone(ZoneInfo(zone)).strftime(SECOND)
    said = page.get_by_role("heading", name="Scaling decisions around").locator("time")
    assert said.get_attribute("datetime") == f"{at.strftime(SECOND)}.000Z"


def test_an_address_that_names_a_zone_is_the_same_moment(visit: Visit):
    page = visit("viewer", "/requests/?since=2026-11-01T12:00:00%2B02:00", timezone_id=KOLKATA)
    assert shown(page, "since") == "2026-11-01T15:30:00"
    search(page, "2026-11-01T10:00:00")


@pytest.mark.parametrize("zone", ZONES)
def test_the_window_of_an_experiment_is_sent_as_utc(visit: Visit, caller: Caller, places: Places, zone: str):
    page = visit("operator", "/experiments/new/", timezone_id=zone)
    page.get_by_role("button", name="last hour").click()
    since = datetime.fromisoformat(shown(page, "since")).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    assert abs(datetime.now(UTC) - timedelta(hours=1) - since) < timedelta(seconds=30)
    page.get_by_role("button", name="yesterday (UTC)").click()
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    assert shown(page, "until") == midnight.astimezone(ZoneInfo(zone)).strftime(SECOND)
    expect(page.locator("#id_until_utc")).to_have_text(f"= {midnight:%Y-%m-%d} 00:00:00 UTC")
    with page.expect_request("**/experiments/check/") as checked:  # what is checked while one types is the same
        page.get_by_role("button", name="last hour").click()
    until = datetime.fromisoformat(shown(page, "until")).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    assert until.strftime(SECOND) in (checked.value.post_data or "")
    page.get_by_label("Name").fill(f"Seen from {zone}")
    page.get_by_role("button", name="Start experiment").click()
    page.wait_for_url("**/experiments/*-*/")
    spec = caller.get(f"simulations/{page.url.rstrip('/').rsplit('/', 1)[1]}")["spec"]
    assert datetime.fromisoformat(spec["workload"]["until"]).astimezone(UTC) == until


@pytest.mark.parametrize("zone", ZONES)
def test_a_key_ends_when_its_maker_says_in_local_time(visit: Visit, caller: Caller, places: Places, zone: str):
    page = visit("admin", f"/tenants/{places['tenant']}/", timezone_id=zone)
    page.get_by_label("Key name").fill(f"until seven in {zone}")
    page.get_by_label("Expires (your time)").fill("2027-07-01T19:00")
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_role("heading", name="Copy your key now")).to_be_visible()
    made = next(each for each in caller.get("api-keys")["items"] if each["name"] == f"until seven in {zone}")
    meant = datetime(2027, 7, 1, 19, tzinfo=ZoneInfo(zone))
    assert datetime.fromisoformat(made["expires_at"]) == meant


def test_without_script_moments_are_utc_and_say_so(visit: Visit, caller: Caller, places: Places):
    arrived = datetime.fromisoformat(caller.get(f"requests/{places['request']}")["arrived_at"]).astimezone(UTC)
    first, last = (each.strftime(SECOND) for each in (arrived, arrived + timedelta(seconds=1)))
    page = visit("viewer", "/requests/", timezone_id=NEW_YORK, java_script_enabled=False)
    page.get_by_label("Arrived after (UTC)").fill(first)
    page.get_by_label("Arrived before (UTC)").fill(last)
    page.get_by_role("button", name="Search").click()
    assert (whole(sent(page, "since")), whole(sent(page, "until"))) == (first, last)
    assert whole(page.get_by_label("Arrived after (UTC)").input_value()) == first
    expect(row_of(page, places["request"])).to_contain_text(f"{arrived:%Y-%m-%d %H:%M:%S} UTC")


def test_where_clocks_show_utc_nothing_is_different(visit: Visit):
    page = visit("viewer", "/requests/?since=2026-11-01T06:30:00")
    expect(page.get_by_label("Arrived after (UTC)")).to_be_visible()
    assert shown(page, "since") == "2026-11-01T06:30:00"
    expect(page.locator("#id_since_utc")).to_be_empty()
    search(page, "2026-11-01T06:30")
    assert whole(sent(page, "since")) == "2026-11-01T06:30:00"
