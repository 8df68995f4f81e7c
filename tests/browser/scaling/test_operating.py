"""Requests, scaling and audit as people use them; markup that stays text."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from tests.browser.every_page.looks import settle

pytestmark = [pytest.mark.browser, pytest.mark.long(95)]


def test_a_miss_is_compared_with_one_that_made_it(visit, places):
    page = visit("viewer", f"/requests/{places['missed']}/")
    expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
    expect(page.get_by_role("region", name="Decisions", exact=True)).to_be_visible()
    page.get_by_role("link", name="Compare with an attained request").click()
    expect(page.get_by_role("heading", name="Compare two requests")).to_be_visible()


def test_two_ticked_requests_are_compared(visit):
    page = visit("viewer", "/requests/")
    boxes = page.locator('#request-rows input[name="id"]')
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.get_by_role("button", name="Compare two selected").click()
    expect(page.locator(".timeline")).to_have_count(2)
    assert page.locator(".timeline .track i").first.evaluate("(bar) => bar.style.left !== ''")


def test_the_audit_is_filtered_and_saved(visit):
    page = visit("viewer", "/audit/")
    page.get_by_label("Kind", exact=False).first.fill("tenant_created")
    page.get_by_role("button", name="Search").click()
    page.wait_for_url("**kind=tenant_created**")
    rows = page.locator("#audit-rows tr")
    expect(rows.first).to_contain_text("tenant_created")
    page.goto(page.url)
    with page.expect_download() as saved:
        page.get_by_role("link", name="Export JSON").click()
    kinds = {row["kind"] for row in json.loads(saved.value.path().read_text())}
    assert kinds == {"tenant_created"}
    with page.expect_download() as saved:
        page.get_by_role("link", name="Export CSV").click()
    assert saved.value.suggested_filename.endswith(".csv")
    assert saved.value.path().read_text().startswith("id,at,actor_type")


def test_a_request_that_has_not_ended_is_looked_for_in_the_queue(visit, trouble):
    trouble.expected = ("404",)
    page = visit("viewer", "/requests/req-not-there/")
    page.get_by_role("link", name="Search the queue").click()
    expect(page.get_by_label("Filter by tenant")).to_have_value("req-not-there")
    nothing = page.get_by_text("No requests match this filter.").or_(page.get_by_text("The queue is empty."))
    expect(nothing).to_be_visible()


def test_an_instance_is_found_in_the_fleet(visit, lane):
    page = visit("viewer", "/fleet/")
    page.locator("[data-fleet-filter]").fill(f"{lane}-1")
    rows = page.locator("[data-instance-rows] > tr:visible")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(f"{lane}-1")
    with page.expect_response(re.compile("/live/")):  # still so after it has moved
        pass
    expect(rows).to_have_count(1)
    page.reload()
    expect(rows).to_have_count(1)


def test_a_scaling_policy_is_changed_undone_and_says_why_it_does_not_scale(visit):
    page = visit("operator", "/scaling/")
    expect(page.locator(".why-now").first).to_contain_text("load")
    page.get_by_role("link", name="Edit demo/collocated").click()
    page.get_by_label("Scale out above").fill("85")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status").filter(has_text="updated")).to_be_visible()
    card = page.get_by_role("region", name="demo, ").filter(has_text="Scale out above")
    expect(card.first).to_contain_text("85 %")
    page.get_by_role("link", name="History of demo/collocated").click()
    expect(page.locator("ins").first).to_contain_text("85 %")
    page.get_by_role("link", name=re.compile("^Revert")).first.click()
    expect(page.get_by_label("Scale out above")).to_have_value("80")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status").filter(has_text="updated")).to_be_visible()


def test_the_number_of_instances_is_set_by_hand_and_then_goes_by_load_again(visit):
    page = visit("operator", "/scaling/")
    card = page.locator("section.section").filter(has_text="demo, collocated").first
    page.get_by_role("link", name="Scale by hand: demo/collocated").click()
    page.get_by_label("Instances").fill("2")  # as many as there are: other tests use this fleet
    page.get_by_label("Reason").fill("a launch")
    page.get_by_role("button", name="Save").click()
    expect(card).to_contain_text("Set to 2 instances by hand until")
    expect(card).to_contain_text("a launch")
    expect(card.locator(".why-now")).to_contain_text("the number of instances is set to 2 by hand")
    page.reload()  # the live part has replaced what was there at first
    page.get_by_role("link", name="Change or end: demo/collocated").click()
    page.get_by_role("button", name="Scale by load").click()
    page.get_by_role("dialog").get_by_role("button", name="Scale by load").click()
    expect(page.locator(".banner.done")).to_contain_text("is scaled by load again")
    expect(card).not_to_contain_text("by hand until")


def test_a_scaling_policy_is_made_switched_off_and_changed(visit, trouble, lane, caller):
    trouble.expected = ("422",)
    page = visit("operator", "/scaling/")
    page.get_by_role("link", name="New policy").click()
    page.get_by_label("Model").select_option(label=lane)
    page.get_by_label("Enabled").uncheck()
    page.get_by_label("Maximum instances").fill("0")
    page.get_by_role("button", name="Create policy").click()
    expect(page.locator("#id_max_instances_error")).to_be_visible()
    page.get_by_label("Maximum instances").fill("2")
    page.get_by_role("button", name="Create policy").click()
    expect(page.get_by_role("status").filter(has_text=f"Scaling policy of {lane}")).to_be_visible()
    page.get_by_role("link", name=f"Edit {lane}/collocated").click()
    expect(page.get_by_label("Enabled")).not_to_be_checked()
    page.get_by_label("Maximum instances").fill("3")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status").filter(has_text="updated")).to_be_visible()
    (stored,) = caller.get("scaling-policies", model=lane)["items"]
    assert (stored["enabled"], stored["max_instances"]) == (False, 3)


@pytest.mark.thorough
def test_each_way_to_scale_in_is_saved_and_shown_again(visit, caller):
    """On a model without engines, so that nothing is put to sleep meanwhile."""
    caller.post("models", {"name": "sleeper", "context_tokens": 8192})
    page = visit("operator", "/scaling/new/")
    page.get_by_label("Model").select_option(label="sleeper")
    page.get_by_label("Minimum instances").fill("0")
    ways = (
        ("Sleep, keep weights in host memory", 1, "sleep, level 1"),
        ("Sleep, discard weights", 2, "sleep, level 2"),
        ("Stop", 0, "stop"),
    )
    for number, (label, level, shown) in enumerate(ways):
        page.get_by_label("Scale-in action").select_option(label=label)
        page.get_by_role("button", name="Save" if number else "Create policy").click()
        expect(page.get_by_role("status").filter(has_text=re.compile("sleeper")).first).to_be_visible()
        (stored,) = caller.get("scaling-policies", model="sleeper")["items"]
        assert stored["sleep_level"] == level
        card = page.get_by_role("region", name="sleeper, ").first
        expect(card.locator("div").filter(has=page.get_by_text("Scale-in action", exact=True)).last).to_contain_text(
            shown
        )
        page.get_by_role("link", name="Edit sleeper/collocated").click()
        expect(page.get_by_label("Scale-in action")).to_have_value(str(level))
        expect(page.get_by_label("Scale-in action").locator("option:checked")).to_have_text(label)


def test_markup_in_every_name_stays_text(visit, stack):
    """A title, a key's name, a search and a request's workflow: shown as they were typed, and nothing runs."""
    evil = '"><img src=x onerror="window.evil=1"><script>window.evil=1</script>'
    page = visit("admin", "/tenants/1/change/")
    page.get_by_label("Title").fill(evil)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("h1 + .lead")).to_contain_text(evil)
    page.get_by_label("Key name").fill(evil[:60])
    page.get_by_role("button", name="Create key").click()
    expect(page.locator("h1")).to_contain_text(evil[:60])
    (sent,) = stack.send(1, prompt=evil, metadata={"workflow_id": evil[:100], "stage": evil[:100]})
    assert sent.result() in (200, 400)
    for path in ("/tenants/", "/tenants/1/", "/audit/", "/", f"/audit/?q={evil}", f"/requests/?tenant={evil}"):
        page.goto(path)
        settle(page)
        assert page.evaluate("window.evil") is None
        assert page.locator("img").count() == 0
    page.goto("/tenants/1/change/")
    page.get_by_label("Title").fill("Demo")
    page.get_by_role("button", name="Save").click()
