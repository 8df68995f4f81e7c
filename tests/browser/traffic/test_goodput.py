"""From the Overview to Goodput: a plain request and a workflow of two, which counts once."""

from __future__ import annotations

import re
import secrets

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_goodput_has_a_row_and_a_line_for_each_type(visit, stack):
    name = f"report-{secrets.token_hex(4)}"
    body = {"model": "demo", "prompt": "Say something.", "max_tokens": 4}
    stack.ask(body).raise_for_status()
    for more in ({"workflow_deadline": 2}, {}):
        stack.ask({**body, **more, "metadata": {"workflow_id": name}}).raise_for_status()
    page = visit("viewer", "/")
    page.get_by_role("link", name="Goodput", exact=True).click()
    expect(page.get_by_role("heading", name="Goodput", level=1)).to_be_visible()
    types = page.get_by_role("region", name="By type", exact=True)
    row = types.get_by_role("row", name=re.compile("^Compound"))
    for _ in range(40):  # it counts once it is due, and the page is kept for five seconds
        if row.count():
            break
        page.wait_for_timeout(500)
        page.reload()
    expect(row).to_contain_text("%")
    drawn = page.locator("[data-chart='goodput'] .plot .scatter path")
    expect(drawn.nth(1)).to_be_attached()  # a line or, of one minute, a point for each type; drawn after the page
    expect(page.locator(".legend")).to_contain_text("Compound")
    page.get_by_label("Period").select_option("day")
    page.get_by_role("button", name="Search").click()
    expect(page.locator(".lead")).to_contain_text("in the last 24 hours")
    expect(types.get_by_role("row", name=re.compile("^Compound"))).to_contain_text("%")
