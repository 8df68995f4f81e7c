"""Classes and mapping through the pages: saved, undone, in conflict, refused."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def open_class(page, name):
    page.goto("/classes/")
    page.get_by_role("link", name=f"Edit {name}").click()
    return page.get_by_label("TTFT")


def test_a_class_is_made_changed_undone_and_removed(visit):
    page = visit("operator", "/classes/new/")
    page.get_by_label("Name", exact=True).fill("browser-made")
    page.get_by_label("TTFT").fill("0.8")
    page.get_by_label("TPOT").fill("0.1")
    page.get_by_role("button", name="Create class").click()
    expect(page.get_by_role("status")).to_contain_text("browser-made created")
    field = open_class(page, "browser-made")
    field.fill("0.6")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("row", name="browser-made")).to_contain_text("600 ms")
    page.get_by_role("link", name="Revert").click()
    expect(page.get_by_label("TTFT")).to_have_value("0.8")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("row", name="browser-made")).to_contain_text("800 ms")
    page.get_by_role("link", name="Remove browser-made").click()
    page.get_by_role("button", name="Remove browser-made").click()
    expect(page.get_by_role("status")).to_contain_text("browser-made removed")
    page.goto("/audit/?q=browser-made")
    expect(page.locator("#audit-rows tr")).to_have_count(4)


def test_a_wrong_value_is_marked_and_nothing_typed_is_lost(visit, trouble):
    trouble.expected = ("422",)
    page = visit("operator")
    field = open_class(page, "interactive")
    field.fill("0")
    page.get_by_label("Title").fill("Kept what I typed")
    page.get_by_role("button", name="Save").click()
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#id_ttft_s_error")).to_contain_text("greater than or equal to")
    expect(page.get_by_label("Title")).to_have_value("Kept what I typed")


def test_a_level_is_added_to_the_mapping_and_taken_away(visit):
    page = visit("operator", "/mappings/1/")
    levels = page.locator("[data-level]")
    before = levels.count()
    page.get_by_role("button", name="Add priority").click()
    expect(levels).to_have_count(before + 1)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status")).to_contain_text("updated")
    expect(page.get_by_role("rowheader", name=f"Priority {before}")).to_be_visible()
    page.get_by_role("link", name="Edit").click()
    page.wait_for_url(re.compile(r"/mappings/\d+/$"))  # loaded, so that the script handles the button
    page.get_by_role("button", name="Remove lowest priority").click()
    expect(levels).to_have_count(before)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("rowheader", name=f"Priority {before}")).to_have_count(0)


def test_requests_are_searched_without_a_new_page(visit):
    page = visit("viewer", "/requests/")
    page.evaluate("window.stayed = true")
    page.get_by_label("Tenant").fill("acme")
    page.get_by_role("button", name="Search").click()
    page.wait_for_url("**tenant=acme**")
    expect(page.locator("#request-rows tr").first).to_contain_text("acme")
    expect(page.locator("#request-rows time").first).to_have_attribute("data-local", "yes")
    assert page.evaluate("window.stayed")
    page.locator("#request-rows a").first.click()
    expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
    widths = page.locator(".timeline .track i").evaluate_all("(bars) => bars.map((bar) => bar.style.left)")
    assert all(width.endswith("%") for width in widths)
