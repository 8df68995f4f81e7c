"""The audit's list stays as it was loaded; what was decided since is counted, and shown when asked for."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from tests.browser.running.caller import within

pytestmark = pytest.mark.browser

FEW = 2
HEARD_S = 10.0
COUNTED = re.compile(r"^Show (\d+)( or more)? newer decisions?$")
NUMBER = "document.querySelector('[data-newer]').textContent.match(/[0-9]+/)"


def decide(caller, name):
    """A command on a request that is not there changes nothing and is on record."""
    return str(caller.post("queue/pause", {"request_ids": [name]})["decision"])


def listed(page):
    """Numbers of the decisions in the list, in its order."""
    links = page.locator("#audit-rows tr:not(.more) a")
    found: list[str] = links.evaluate_all("(all) => all.map((link) => link.pathname.match(/[0-9]+/)[0])")
    return found


def counted(page):
    found = COUNTED.fullmatch(page.locator("[data-newer]").inner_text())
    assert found is not None
    return int(found[1])


def test_newer_decisions_are_counted_while_the_list_stays_and_shown_when_asked_for(visit, caller):
    page = visit("viewer", "/audit/")
    before = listed(page)
    made = [decide(caller, f"audited-{number}") for number in range(FEW)]
    page.wait_for_function(f"least => Number({NUMBER}) >= least", arg=FEW)
    assert listed(page) == before
    least = counted(page)  # the scaler decides as well
    page.locator("[data-newer]").click()
    expect(page.locator("#audit-rows")).to_contain_text(f"audited-{FEW - 1}")
    after = listed(page)
    assert set(made) <= set(after)
    assert len([each for each in after if each not in before]) >= least


def test_what_the_list_has_already_is_not_counted(visit, caller):
    """The page hears of the newest forty when it has loaded: those are in its list."""
    made = decide(caller, "listed-before")
    page = visit("viewer", "/classes/")
    frames: list[str] = []

    def keep(text):
        frames.append(text)

    page.on("websocket", lambda socket: socket.on("framereceived", keep))
    page.goto("/audit/")
    known = set(listed(page))
    assert made in known

    def heard():
        return {each["id"] for text in frames for each in json.loads(text).get("data", {}).get("decisions", [])}

    new = decide(caller, "not-listed")
    page.wait_for_function(f"() => Number({NUMBER}) >= 1")
    # Asking the page comes first: frames arrive only while the browser is asked something.
    within(HEARD_S, lambda: counted(page) == len(heard() - known) and {made, new} <= heard())
