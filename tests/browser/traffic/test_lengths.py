"""Answer lengths, from the list of requests: each model with its versions, or why there is none."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_each_model_says_what_predicts_its_lengths(visit):
    page = visit("viewer", "/requests/")
    page.get_by_role("link", name="Answer lengths").click()
    expect(page.get_by_role("heading", name="Answer lengths", level=1)).to_be_visible()
    model = page.locator("section", has=page.get_by_role("heading", name=re.compile("^demo")))
    expect(model).to_contain_text(re.compile(r"no version in use|version \d+ in use"))
    versions = model.get_by_role("region", name=re.compile("^Versions of demo"))
    expect(versions.or_(model.get_by_text("No version yet"))).to_be_visible()
    expect(page.get_by_role("link", name="Requests", exact=True).first).to_have_attribute("aria-current", "page")
