"""A scale-out followed by clicking: scaling at that moment, the decision, the instance, its first token, and back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.every_page.looks import settle
from tests.browser.running.caller import Caller, end_engines, engine_of_its_own, within
from tests.browser.running.stack import Stack
from tests.browser.screenshots.scale_out import warm

pytestmark = [pytest.mark.browser, pytest.mark.long(55)]

MODEL = "followed"
LOADS = "engine=0.9,host=2.7,disk=4.1"  # emulated, so that a warm engine is told where to get its weights
POLICY = {
    "min_instances": 1, "max_instances": 2, "upper": 0.8, "lower": 0.01, "sustain_s": 600, "cooldown_s": 1,
    "interval_s": 1, "warm": 1,
}  # fmt: skip
WARM_S, SERVED_S = 90.0, 120.0
STEPS = ["Decided", "Requested", "Weights loaded", "Ready", "First token"]


@pytest.fixture(scope="module")
def scaled_out(stack: Stack, caller: Caller) -> Iterator[dict[str, Any]]:
    """The scale-out that took the one warm engine, once that has served."""
    engine_of_its_own(caller, MODEL, emulated_load_s=LOADS, scheduler="slackline")
    caller.post("scaling-policies", {"model": MODEL, **POLICY})
    within(WARM_S, lambda: warm(caller, MODEL))
    sent = stack.send(40, model=MODEL, slo_class="batch", waiting_time=60, max_tokens=100)
    within(SERVED_S, lambda: caller.recorded("scale_out_served", subject=f"{MODEL}/collocated"))
    yield caller.recorded("scale_out", subject=f"{MODEL}/collocated")[-1]
    for each in sent:
        each.result()
    end_engines(caller, MODEL)


def steps(page: Page, name: str = "Startup") -> Locator:
    return page.get_by_role("region", name=name).first.locator("tbody th")


def test_from_the_moment_to_the_first_token_and_back(visit, scaled_out):
    (name,) = scaled_out["outcome"]["started"]
    page = visit("viewer", f"/scaling/?at={scaled_out['at'][:19]}")
    events = page.get_by_role("region", name="Scaling decisions around").first
    expect(events.get_by_text("the chosen time")).to_be_visible()
    expect(page.get_by_role("region", name="Instance startup around").first.get_by_text(name)).to_be_visible()
    events.get_by_role("link", name=f"scaled out {MODEL}/collocated").first.click()
    expect(steps(page, f"Startup of {name}")).to_have_text(STEPS)
    page.get_by_role("link", name=f"Instance {name}").click()
    expect(steps(page)).to_have_text(STEPS)
    settings = page.get_by_role("region", name="Engine settings")
    expect(settings).to_contain_text("slackline")
    page.get_by_role("link", name=f"{name} of {MODEL}/collocated: first token").click()
    page.get_by_role("definition").get_by_role("link", name=str(scaled_out["id"]), exact=True).click()
    expect(page).to_have_url(re.compile(rf"/audit/{scaled_out['id']}/$"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [1440, 390])
def test_its_pages_fit_their_width(visit, scaled_out, width):
    (name,) = scaled_out["outcome"]["started"]
    moment, decision = f"/scaling/?at={scaled_out['at'][:19]}", f"/audit/{scaled_out['id']}/"
    for path in ("/scaling/", moment, decision, f"/fleet/instances/{name}/"):
        page = visit("viewer", path, width=width)
        settle(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
