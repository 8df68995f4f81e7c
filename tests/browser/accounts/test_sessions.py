"""Sessions in a real browser: found on the page, ended there, and gone at once in the other browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import sign_in
from tests.browser.every_page.looks import settle

pytestmark = [pytest.mark.browser, pytest.mark.long(80)]
FIREFOX = "Mozilla/5.0 (Windows NT 10.0; Win64; x64; rv:140.0) Gecko/20100101 Firefox/140.0"


def test_a_session_is_ended_from_another_one(visit, stack, trouble):
    here, there = visit(None, "/login/"), visit(None, "/login/", user_agent=FIREFOX)
    for page in (here, there):
        sign_in(page, *stack.person("viewer"))
    here.get_by_role("link", name="Sessions").click()
    expect(here.get_by_role("heading", name="Sessions", level=1)).to_be_visible()
    expect(here.get_by_text("this session", exact=True)).to_have_count(1)
    here.get_by_role("button", name="Firefox on Windows").click()
    here.get_by_role("dialog").get_by_role("button", name="End session").click()
    expect(here.get_by_role("status").filter(has_text="1 session ended.")).to_be_visible()
    expect(here.get_by_text("Firefox on Windows")).to_have_count(0)
    there.goto("/classes/")
    expect(there.get_by_role("heading", name="Sign in")).to_be_visible()


@pytest.mark.thorough
def test_too_many_failures_are_explained(visit, trouble):
    trouble.expected = ("429",)
    page = visit(None, "/login/")
    for _ in range(11):
        page.get_by_label("Username").fill("nobody-of-that-name")
        page.get_by_label("Password").fill("wrong")
        page.get_by_role("button", name="Sign in").click()
        settle(page)
    expect(page.get_by_role("alert")).to_contain_text("Too many failed attempts for this account. Try again in 15 min")


def test_a_page_of_a_session_with_too_many_live_connections_says_so(visit):
    page = visit("viewer")
    page.evaluate(
        """async () => {
          const opened = (socket) => new Promise((done) => (socket.onopen = socket.onclose = done));
          window.sockets = Array.from({ length: 40 }, () => new WebSocket(`ws://${location.host}/ws/overview`));
          await Promise.all(window.sockets.map(opened));
        }"""
    )
    further = page.context.new_page()
    further.goto("/queue/")
    said = further.get_by_role("status").filter(has_text="Too many pages are open in this session. Close some of them.")
    expect(said).to_be_visible()
