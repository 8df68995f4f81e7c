"""Recorded figures on real pages: all that this system has recorded is said in words, and stays reachable as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from controller.wording.vocabulary import NAMES, shown
from tests.browser.every_page.places import Places
from tests.browser.running.caller import Caller

pytestmark = pytest.mark.browser
Visit = Callable[..., Page]


def all_of(caller: Caller, path: str, most: int = 20, **query: Any) -> list[dict[str, Any]]:
    """The newest pages of a list."""
    found: list[dict[str, Any]] = []
    for _ in range(most):
        page = caller.get(path, limit=200, **query)
        found += page["items"]
        if not page.get("next_cursor"):
            break
        query["cursor"] = page["next_cursor"]
    return found


def test_nothing_is_recorded_that_has_no_name(caller: Caller, places: Places):
    """What the sources could not tell shows here: keys that a running system puts into its records."""
    unknown = set()
    decisions = all_of(caller, "decisions")
    assert {"instance_ready", "slo_class_created"} <= {each["kind"] for each in decisions}
    for each in decisions:
        for part in (each["inputs"], each["outcome"]):
            inner = [part[name] for name in ("before", "after") if isinstance(part.get(name), dict)]
            unknown |= {(each["kind"], key) for values in (part, *inner) for key in values if key not in NAMES}
    for name in ("request", "missed"):
        for step in caller.get(f"requests/{places[name]}")["decisions"]:
            unknown |= {(step["kind"], key) for key in step["figures"] if key not in NAMES}
    assert unknown == set()


def test_a_decision_is_said_in_words_with_units_and_kept_as_recorded(visit: Visit, caller: Caller, places: Places):
    ready = all_of(caller, "decisions", kind="instance_ready")
    made = next(each for each in ready if each["reason"] == "healthy")  # not one that is ready again
    waited_s = made["inputs"]["since_desired_s"]
    page = visit("viewer", f"/audit/{made['id']}/")
    fact = page.locator("dl.facts div").filter(has=page.get_by_text("time since the request", exact=True))
    expect(fact.locator("dd")).to_have_text(shown("since_desired_s", waited_s))
    assert fact.get_attribute("title") == f"since_desired_s: {waited_s}"
    for key in made["inputs"]:
        if "_" in key:
            expect(page.locator("main")).not_to_contain_text(key)
    page.get_by_role("link", name="View as JSON").click()
    expect(page.locator("body")).to_contain_text('"since_desired_s"')


def test_a_requests_figures_have_units_and_their_keys_on_hover(visit: Visit, places: Places):
    page = visit("viewer", f"/requests/{places['request']}/")
    sent = page.locator("tr").filter(has_text="Dispatched")
    slack = sent.locator('.figure[title^="slack_s: "]')
    expect(slack).to_contain_text("time left to its TTFT target")
    expect(sent.locator('.figure[title^="token_budget: "]')).to_contain_text("tokens")
    expect(page.locator("main")).not_to_contain_text("slack_s")
    expect(page.get_by_text("Judged by token times")).to_be_visible()


def test_a_change_is_said_with_units(visit: Visit, caller: Caller, places: Places):
    page = visit("operator", f"/mappings/{places['mapping']}/")
    field = page.get_by_label("Minimum TTFT").first
    before = float(field.input_value())
    field.fill(str(before - 0.0125))
    page.get_by_role("button", name="Save").click()
    page.wait_for_url("**/mappings/")
    try:
        page.goto(f"/mappings/{places['mapping']}/history/")
        row = page.locator("tr.change").first
        expect(row.get_by_role("rowheader")).to_have_text("level 0: minimum TTFT")
        assert row.get_by_role("rowheader").get_attribute("title") == "levels[0].ttft_min_s"
        expect(row.locator("ins")).to_have_text(f"{1000 * (before - 0.0125):.4g} ms")
    finally:
        page.goto(f"/mappings/{places['mapping']}/")
        page.get_by_label("Minimum TTFT").first.fill(str(before))
        page.get_by_role("button", name="Save").click()
        page.wait_for_url("**/mappings/")
