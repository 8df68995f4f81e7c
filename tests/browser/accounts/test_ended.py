"""A session that ends under an open page: the page says so, and what was typed is not lost."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import sign_in

pytestmark = [pytest.mark.browser, pytest.mark.long(100)]

ENDED = "Your session has ended"
SOON_MS = 10_000  # the next look at the session itself would be up to half a minute later


def signed_out_elsewhere(page):
    """In another tab of the same browser."""
    other = page.context.new_page()
    other.goto("/classes/")
    other.get_by_role("button", name="Sign out").click()
    expect(other.get_by_role("heading", name="Sign in")).to_be_visible()
    return other


@pytest.fixture
def own_session(visit, stack):
    """A browser of somebody with a session of its own, which a test may end."""

    def opened(role, path):
        page = visit(None, "/login/")
        sign_in(page, *stack.person(role), path)
        return page

    return opened


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", ["/", "/queue/"])
def test_a_live_page_says_within_seconds_that_one_signed_out(own_session, path):
    page = own_session("viewer", path)
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    signed_out_elsewhere(page)
    expect(page.locator("[data-banner]")).to_contain_text(ENDED, timeout=SOON_MS)
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "lost")


def test_a_page_that_comes_back_after_its_session_ended_says_so(own_session, trouble):
    """A machine that slept: its socket is refused, which alone would look as if the console were away."""
    trouble.expected = ("WebSocket", "403")
    page = own_session("viewer", "/queue/")
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    page.context.clear_cookies(name=re.compile("^slackline_session"))
    # Whatever was heard last was long ago, says its clock.
    page.evaluate("{ let calls = 0; performance.now = () => 10_000 * calls++; }")
    expect(page.locator("[data-banner]")).to_contain_text(ENDED, timeout=4 * SOON_MS)


def test_a_preview_says_so_too(own_session):
    page = own_session("operator", "/classes/")
    page.get_by_role("link", name="Edit interactive").click()
    judged = page.locator("[data-judged]")
    expect(judged).not_to_contain_text("Loading")
    signed_out_elsewhere(page)
    page.get_by_label("TTFT").fill("0.91")
    expect(judged).to_have_text(re.compile(ENDED))
    page.get_by_role("button", name=re.compile("^Run simulation")).click()
    expect(page.locator("[data-simulated]")).to_contain_text(ENDED)


def test_what_was_typed_is_in_the_form_again_after_signing_in(own_session, stack):
    page = own_session("operator", "/classes/")
    page.get_by_role("link", name="Edit batch").click()
    field = page.get_by_label("TTFT")
    before = field.input_value()
    signed_out_elsewhere(page)
    field.fill("9.91")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status")).to_contain_text("input is kept for 15 minutes")
    name, password = stack.person("operator")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
    expect(field).to_have_value("9.91")
    expect(page.get_by_role("status").first).to_contain_text("not saved yet")
    page.reload()
    expect(field).to_have_value(before)


def test_a_form_from_before_another_sign_in_is_kept(own_session, stack, trouble):
    trouble.expected = ("403",)
    page = own_session("operator", "/classes/new/")
    page.get_by_label("Name", exact=True).fill("typed-before")
    sign_in(signed_out_elsewhere(page), *stack.person("admin"))
    page.get_by_role("button", name="Create class").click()
    expect(page.get_by_role("heading", name="The form could not be verified")).to_be_visible()
    page.get_by_role("link", name="Back to the form").click()
    expect(page.get_by_label("Name", exact=True)).to_have_value("typed-before")


def test_a_class_that_somebody_else_removed_is_made_again(visit, trouble):
    trouble.expected = ("410",)
    first = visit("operator", "/classes/new/")
    first.get_by_label("Name", exact=True).fill("short-lived")
    first.get_by_label("TTFT").fill("0.8")
    first.get_by_label("TPOT").fill("0.1")
    first.get_by_role("button", name="Create class").click()
    first.get_by_role("link", name="Edit short-lived").click()
    expect(first.locator("[data-judged]")).not_to_contain_text("Loading")
    second = visit("admin", "/classes/")
    second.get_by_role("link", name="Remove short-lived").click()
    second.get_by_role("button", name="Remove short-lived").click()
    expect(second.get_by_role("status")).to_contain_text("short-lived removed")
    first.get_by_label("TTFT").fill("0.66")
    expect(first.locator("[data-judged]")).to_contain_text("Class short-lived was removed by admin")
    first.get_by_role("button", name="Save").click()
    expect(first.get_by_role("heading", name="Class short-lived was removed")).to_be_visible()
    expect(first.get_by_role("row", name="TTFT")).to_contain_text("0.66 s")
    first.get_by_role("button", name="Create again with these values").click()
    expect(first.get_by_role("row", name="short-lived")).to_contain_text("660 ms")
    second.goto("/classes/")
    second.get_by_role("link", name="Remove short-lived").click()
    second.get_by_role("button", name="Remove short-lived").click()
