"""Two people change the same thing: the second one sees what the first one saved, and nothing of either is lost."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

# Page, field, what the first and the second person type.
EDITED = [
    ("/classes/{class}/", "Title", "Told by the first", "Told by the second"),
    ("/mappings/{mapping}/", "Requests in the window", "991", "992"),
    ("/tenants/{tenant}/change/", "Title", "Demo one", "Demo two"),
    ("/scaling/{policy}/", "Cooldown", "11.0", "12.0"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("path", "label", "former", "latter"), EDITED)
def test_the_second_one_sees_the_conflict_and_may_save_over_it(visit, places, trouble, path, label, former, latter):
    trouble.expected = ("412",)
    address = path.format_map(places)
    first, second = visit("admin", address), visit("admin", address)
    for page, value in ((first, former), (second, latter)):
        page.get_by_label(label).fill(value)
    first.get_by_role("button", name="Save", exact=True).click()
    expect(first.get_by_role("status").filter(has_text=re.compile("updated"))).to_be_visible()
    second.get_by_role("button", name="Save", exact=True).click()
    conflict = second.get_by_role("alert").filter(has_text="was changed by someone else")
    expect(conflict).to_contain_text(former)
    expect(conflict).to_contain_text(latter)
    expect(second.get_by_label(label)).to_have_value(latter)
    second.get_by_role("button", name="Overwrite with my changes").click()
    expect(second.get_by_role("alert")).to_have_count(0)
    second.goto(address)
    expect(second.get_by_label(label)).to_have_value(latter)


def test_one_operators_class_is_anothers_conflict(visit, trouble):
    """Two roles, one class: the values of both are side by side, in their units."""
    trouble.expected = ("412",)
    first, second = visit("operator", "/classes/"), visit("admin", "/classes/")
    for page, value in ((first, "1.9"), (second, "2.1")):
        page.get_by_role("link", name="Edit summaries").click()
        page.get_by_label("TTFT").fill(value)
    first.get_by_role("button", name="Save").click()
    expect(first.get_by_role("status").filter(has_text="summaries updated")).to_be_visible()
    second.get_by_role("button", name="Save").click()
    conflict = second.get_by_role("alert").filter(has_text="was changed by someone else")
    expect(conflict).to_contain_text("1.9 s")
    expect(conflict).to_contain_text("2.1 s")
    second.get_by_role("button", name="Overwrite with my changes").click()
    expect(second.get_by_role("row", name="summaries")).to_contain_text("2.10 s")
