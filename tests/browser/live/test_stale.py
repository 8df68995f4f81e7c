"""An Overview that hears nothing keeps its figures and claims nothing of now."""

from __future__ import annotations

import os
import re
import signal

import pytest
from playwright.sync_api import expect

from tests.browser.every_page.looks import beyond, serious_findings

pytestmark = pytest.mark.browser

LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
NOW = re.compile(r"\bnow\b", re.IGNORECASE)
# How far a text's colour is from grey: 0 to 255.
TINT = """(element) => { const parts = getComputedStyle(element).color.match(/\\d+/g).map(Number);
  return Math.max(...parts) - Math.min(...parts); }"""


@pytest.fixture
def frozen(stack):
    """Call it to stop the gateway as it is; it goes on when the test ends."""
    pid = stack.pid("gateway")
    yield lambda: os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.thorough
def test_with_the_gateway_frozen_the_headline_is_stale_and_grey(visit, stack, frozen):
    for each in stack.send(2, slo_class="interactive", max_tokens=5):
        each.result()
    pages = [visit("viewer", "/", *look) for look in LOOKS]
    for page in pages:
        expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
        expect(page.locator("#summary")).not_to_have_attribute("data-stale", "")
    frozen()
    for page, (width, _) in zip(pages, LOOKS, strict=True):
        summary = page.locator("#summary")
        expect(page.get_by_text("This data is stale.")).to_be_visible()
        expect(summary).to_have_attribute("data-stale", "")
        expect(summary.get_by_role("heading")).to_have_text(re.compile("^At the last update, "))
        expect(summary).not_to_contain_text(NOW)
        expect(page.get_by_role("heading", level=1).locator("xpath=..")).not_to_contain_text(NOW)
        for part in ("#summary .badge", "[data-classes] .badge", '[data-total="attainment"]', "[data-instance] .badge"):
            assert page.locator(part).first.evaluate(TINT) < 40, part
        assert serious_findings(page) == []
        assert beyond(page, width) == 0
    os.kill(stack.pid("gateway"), signal.SIGCONT)
    for page in pages:
        expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live", timeout=30_000)
        expect(page.locator("#summary")).not_to_have_attribute("data-stale", "")
        expect(page.locator("#summary").get_by_role("heading")).not_to_contain_text("At the last update")


def test_a_connection_that_is_lost_says_so_too(visit, trouble):
    trouble.expected = ("ERR_INTERNET_DISCONNECTED", "WebSocket")
    page = visit("viewer")
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    page.context.set_offline(True)
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "lost", timeout=20_000)
    expect(page.locator("#summary").get_by_role("heading")).to_have_text(re.compile("^At the last update, "))
    expect(page.locator("#summary")).to_have_attribute("data-stale", "")
    page.context.set_offline(False)
    expect(page.locator("#summary")).not_to_have_attribute("data-stale", "", timeout=30_000)
