"""Overview and Queue move by themselves, and say when they do not."""

from __future__ import annotations

import os
import re
import signal

import pytest
from playwright.sync_api import expect

from tests.browser.running.caller import busy

pytestmark = [pytest.mark.browser, pytest.mark.long(95)]


def test_the_overview_moves_and_draws(visit):
    page = visit("viewer")
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    expect(page.locator("[data-classes] tr").first).to_be_visible()
    expect(page.locator('[data-chart="queue"] .main-svg').first).to_be_visible()
    finished = page.locator('[data-total="finished"]')
    before = finished.inner_text()
    expect(finished).not_to_have_text(before, timeout=30_000)
    expect(page.locator("[data-decisions] li").first).to_be_visible()
    expect(page.locator("[data-instance]").first).to_contain_text("running")


def test_what_a_person_presses_stays_while_the_overview_updates(visit):
    """A line of the summary and a decision that are replaced under the pointer would lose the click and the focus."""
    page = visit("viewer")
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    expect(page.locator("[data-decisions] li").first).to_be_visible()
    finished = page.locator('[data-total="finished"]')

    def next_frame():
        expect(finished).not_to_have_text(finished.inner_text(), timeout=30_000)

    next_frame()  # the first frame may replace what the page came with
    line = page.locator("[data-summary-lines] li").first.element_handle()
    decision = page.locator("[data-decisions] li").first.element_handle()
    next_frame()
    assert line.evaluate("(element) => element.isConnected")
    assert decision.evaluate("(element) => element.isConnected")


def test_a_row_leads_to_the_requests_behind_it(visit):
    page = visit("viewer")
    row = page.locator("[data-classes] tr").first
    tenant = row.locator('[data-cell="tenant"]').inner_text()
    row.get_by_role("link", name="Misses").click()
    page.wait_for_url("**/requests/**")
    assert page.get_by_label("Tenant").input_value() == tenant
    assert page.get_by_label("SLO").input_value() == "no"


def test_a_burst_shows_in_the_queue_with_its_slack_and_can_be_cancelled(visit, stack, lane):
    page = visit("operator", "/queue/")
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    with busy(stack, lane):  # no class leaves the queue under the pointer, however slow the page is
        sent = stack.send(40, model=lane, slo_class="batch", max_tokens=2)
        row = page.locator("[data-rows] tr:not(.space)").filter(has_text="batch").first
        expect(row).to_be_visible()
        width = row.locator(".meter > i").evaluate("(bar) => bar.style.width")
        assert re.fullmatch(r"[\d.]+%", width)
        page.locator('.queue-class[data-key="demo/batch"]').click()
        page.get_by_role("button", name="Pause updates").click()
        last = page.locator("[data-rows] tr:not(.space)").last
        last.get_by_role("checkbox").check()
        page.get_by_role("button", name="Cancel requests").click()
        page.get_by_role("dialog").locator("[data-confirm-yes]").click()
        expect(page.locator("[data-answer]")).to_contain_text("cancelled")
    statuses = [each.result() for each in sent]
    assert (statuses.count(499), statuses.count(200)) == (1, 39)
    page.goto("/audit/?kind=queue_cancel")
    expect(page.locator("#audit-rows")).to_contain_text("operator cancelled")


@pytest.mark.parametrize("path", ["/fleet/", "/fleet/instances/{instance}/", "/scaling/"])
def test_a_page_that_is_asked_for_again_moves_without_being_loaded_again(visit, places, path):
    page = visit("viewer", path.format_map(places))
    page.evaluate("window.stayed = true")
    with page.expect_response(re.compile("/live/")) as answer:
        expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    assert answer.value.ok
    expect(page.locator("[data-live-state]")).to_have_text(re.compile("^Live, updated .+ ago$"))
    assert page.evaluate("window.stayed")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", ["/", "/fleet/"])
def test_redis_hanging_is_said_and_the_page_recovers(visit, stack, path):
    page = visit("viewer", path)
    state = page.locator("[data-live-state]")
    expect(state).to_have_attribute("data-state", "live")
    redis = stack.pid("redis")
    os.kill(redis, signal.SIGSTOP)
    try:
        expect(state).to_have_attribute("data-state", "stale", timeout=15_000)
        expect(page.locator("[data-banner]")).to_be_visible()
    finally:
        os.kill(redis, signal.SIGCONT)
    expect(state).to_have_attribute("data-state", "live", timeout=30_000)
    expect(page.locator("[data-banner]")).to_be_hidden()
