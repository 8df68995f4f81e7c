"""Pages that ask for their parts again go on through a rolling upgrade, and say when what they show is gone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.running.caller import PROFILE, within

pytestmark = pytest.mark.browser

LIVE = re.compile("/live/")
LONGEST_PAUSE_MS = 70_000
SPREAD = 0.11  # a hundred pages do not ask at once
# What a page waits before it asks again: shorter ones are not questions, ten seconds are its patience for an answer.
KEEP_PAUSES = """window.pauses = [];
  const wait = window.setTimeout;
  window.setTimeout = (work, ms, ...rest) => {
    if (ms > 2000 && ms !== 10_000) window.pauses.push(ms);
    return wait(work, ms, ...rest);
  };"""
MODEL = "short-lived"
AGE = re.compile(r"^Last update [\d.]+ (ms|s|min) ago\.$")
ANSWERS = {
    404: ("text/html", "Not found"),
    502: ("text/html", "Bad gateway"),
    503: ("text/html", "Service unavailable"),
}


def soon(page):
    """Its next question is due, however long it meant to wait."""
    page.clock.fast_forward(LONGEST_PAUSE_MS)


def asked(page, ask=soon):
    """It has asked once more, and what it was answered is on the page."""
    before = page.evaluate("window.pauses.length")
    ask(page)
    page.wait_for_function("before => window.pauses.length > before", arg=before)


@pytest.fixture
def upgrading(visit, trouble):
    """A page whose questions are answered as by a console that is being replaced: `statuses` in turn, then truly."""
    trouble.expected = ("404", "502", "503")

    def open_page(path, statuses):
        page = visit("viewer", "/classes/")
        page.clock.install()
        left = list(statuses)

        def answer(route):
            if not left:
                return route.fallback()
            status = left.pop(0)
            kind, body = ANSWERS[status]
            return route.fulfill(status=status, content_type=kind, body=body)

        page.route(LIVE, answer)
        page.add_init_script(KEEP_PAUSES)
        page.goto(path)
        return page

    return open_page


@pytest.mark.parametrize("status", [404, 502, 503])
def test_a_page_goes_on_when_a_console_is_replaced(upgrading, status):
    page = upgrading("/fleet/", [status, status])
    state, banner = page.locator("[data-live-state]"), page.locator("[data-banner]")
    page.evaluate("window.stayed = true")
    for _ in range(2):
        with page.expect_response(LIVE) as said:
            soon(page)
        assert said.value.status == status
        expect(state).to_have_attribute("data-state", "lost")
        expect(state).to_contain_text("Retrying")
    expect(banner).to_be_visible()
    expect(page.locator("[data-banner-age]")).to_have_text(AGE)
    with page.expect_response(LIVE) as said:
        soon(page)
    assert said.value.ok
    expect(state).to_have_attribute("data-state", "live")
    expect(banner).to_be_hidden()
    assert page.evaluate("window.stayed")


def test_pauses_grow_while_it_is_away_and_are_short_again_afterwards(upgrading):
    page = upgrading("/fleet/", [502, 404, 503, 404])
    for _ in range(5):
        asked(page)
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    pauses = page.evaluate("window.pauses")
    assert pauses == [pytest.approx(ms, rel=SPREAD) for ms in (3000, 6000, 12_000, 15_000, 15_000, 3000)]


def test_what_is_deleted_is_said_to_be_gone_and_stays_as_it_was_last(visit, trouble, caller):
    trouble.expected = ("404",)
    name = f"{MODEL}-1"
    caller.post("models", {"name": MODEL, "context_tokens": 8192})
    body = {"id": name, "model": MODEL, "backend": "reference", "provisioner": "process", "max_num_seqs": 1}
    caller.post("instances", {**body, "spec": {"profile": PROFILE}})
    page = visit("viewer", "/classes/")
    page.clock.install()
    page.add_init_script(KEEP_PAUSES)
    page.goto(f"/fleet/instances/{name}/")
    state = page.locator("[data-live-state]")
    expect(state).to_have_attribute("data-state", "live")
    stopped = caller.post(f"instances/{name}/stop", {"version": caller.get(f"instances/{name}")["version"]})
    assert stopped["desired_state"] == "stopped"
    within(120, lambda: caller.get(f"instances/{name}")["observed_state"] in ("stopped", "gone", "failed"))
    # From here on it asks when told to and never by itself: each question below is one of those counted.
    asked(page, lambda page: page.clock.pause_at(page.evaluate("Date.now()") + LONGEST_PAUSE_MS))
    asked(page)
    expect(state).to_have_attribute("data-state", "live")
    caller.delete(f"instances/{name}", caller.get(f"instances/{name}")["version"])
    for times in range(1, 5):
        asked(page)
        expect(state).to_have_attribute("data-state", "lost")
        said = "This no longer exists. You see its last known state" if times == 4 else "Not found. Retrying"
        expect(state).to_contain_text(said)
    expect(page.locator("[data-banner-text]")).to_contain_text("This no longer exists")
    expect(page.locator("[data-banner-age]")).to_have_text(AGE)
    expect(page.get_by_role("heading", name=name)).to_be_visible()
