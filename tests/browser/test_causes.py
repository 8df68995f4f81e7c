"""The walk from a class that misses its SLO to the cause and the saved fix, with the clicks counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.running.caller import Caller, end_engines, engine_of_its_own, within
from tests.browser.running.stack import Stack

pytestmark = [pytest.mark.browser, pytest.mark.long(60)]

MODEL, CLASS = "walked", "walk"
POLICY = {
    "min_instances": 1, "max_instances": 1, "upper": 0.8, "lower": 0.1, "sustain_s": 60, "cooldown_s": 1,
    "interval_s": 1, "warm": 0,
}  # fmt: skip
CANNOT = f"cannot scale out {MODEL}/collocated"
HELD_S, SCALED_S = 60.0, 60.0


class Clicks:
    """Counts them as it makes them."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, control: Locator) -> None:
        control.click()
        self.made += 1


@pytest.fixture(scope="module")
def one_engine(caller: Caller) -> Iterator[None]:
    """A class whose model has one slow engine, and a policy that allows no other."""
    promise = {"ttft_s": 1.0, "tpot_s": 0.2, "waiting_time_s": 4.0, "target": 0.95}
    caller.post("slo-classes", {"name": CLASS, **promise})
    engine_of_its_own(caller, MODEL)
    caller.post("scaling-policies", {"model": MODEL, **POLICY})
    yield
    end_engines(caller, MODEL)


@pytest.fixture
def overload(stack: Stack, caller: Caller, one_engine: None) -> Iterator[list[Future[int]]]:
    """More than it can serve: of that class most expire."""
    sent = stack.send(12, model=MODEL, slo_class=CLASS, max_tokens=300)
    within(HELD_S, lambda: caller.recorded("scale_hold", subject=f"{MODEL}/collocated"))
    sent += stack.send(6, model=MODEL, slo_class=CLASS, max_tokens=300)
    yield sent
    for each in sent:
        each.result()


def row_of_the_class(page: Page) -> Locator:
    row = page.locator("[data-classes] tr").filter(has=page.get_by_text(CLASS, exact=True))
    expect(row.locator("[data-cell=status]")).to_have_text("below target", timeout=30_000)
    return row


def test_from_a_missing_class_to_the_decisions_that_explain_it(visit, overload, caller):
    """Overview, its decisions, the one that held the fleet back, the policy's form: three clicks to the control."""
    page, click = visit("operator"), Clicks()
    row = row_of_the_class(page)
    within(30, lambda: any(f"demo/{CLASS}" in each["inputs"]["by_class"] for each in caller.recorded("refusals")))
    click(row.get_by_role("link", name="Audit"))
    expect(page.get_by_role("heading", name=f"Decisions affecting {CLASS} of demo")).to_be_visible()
    rows = page.locator("#audit-rows tr")
    expect(rows.filter(has_text=f"of them {CLASS}").first).to_be_visible()
    assert not rows.filter(has_text="cannot scale out demo/collocated").count(), "another model's scaler"
    click(rows.get_by_role("link", name=CANNOT).first)
    expect(page.get_by_role("link", name="Scaling at this time")).to_be_visible()
    click(page.get_by_role("link", name="Edit policy"))
    expect(page.get_by_label("Maximum instances")).to_have_value("1")
    assert click.made == 3


def test_from_the_headline_to_the_saved_fix_in_four_clicks(visit, overload, stack, caller):
    """The class that is missed, one of its misses, the policy that stood in its way, and Save: then the scaler acts."""
    page, click = visit("operator"), Clicks()
    row_of_the_class(page)
    click(page.locator("[data-summary-lines]").get_by_role("link", name=f"{CLASS} · demo"))
    page.wait_for_url("**attained=no**")
    lost = page.locator("#request-rows tr").filter(has_text="expired").first
    click(lost.get_by_role("rowheader").get_by_role("link"))
    why = page.get_by_role("region", name="Why it missed")
    expect(why).to_contain_text(
        re.compile(r"It timed out after 4\.\d+ s in the queue: the only available instance was busy")
    )
    expect(why).to_contain_text(re.compile("the maximum of 1 instance (is|was) reached"))
    around = page.get_by_role("region", name="Related decisions").first
    expect(around.get_by_role("link", name=CANNOT).first).to_be_visible()
    request_page = page.url
    click(why.get_by_role("link", name=f"Edit policy of {MODEL}"))
    page.get_by_label("Maximum instances").fill("2")
    click(page.get_by_role("button", name="Save"))
    expect(page.get_by_role("status").filter(has_text="updated")).to_be_visible()
    assert click.made == 4

    page.goto(request_page)  # what caused it stays what it was
    expect(why).to_contain_text(re.compile("the maximum of 1 instance (is|was) reached"))
    overload += stack.send(6, model=MODEL, slo_class=CLASS, max_tokens=300)
    within(SCALED_S, lambda: caller.recorded("scale_out", subject=f"{MODEL}/collocated"))


def test_a_miss_leads_to_what_surrounded_it(visit, overload):
    """As a viewer: the scaler at that moment, the class's history, the instance, and every decision around it."""
    page = visit("viewer", f"/requests/?slo_class={CLASS}&attained=no")
    page.locator("#request-rows th a").first.click()
    why = page.get_by_role("region", name="Why it missed")
    expect(why.get_by_role("link", name="Edit policy")).to_have_count(0)
    request_page = page.url
    for link, heading in (
        ("Scaling at this time", "Scaling"),
        (f"Class {CLASS}", re.compile(CLASS)),
        ("Related decisions", f"Decisions affecting {CLASS} of demo"),
    ):
        why.get_by_role("link", name=link).click()
        expect(page.get_by_role("heading", name=heading).first).to_be_visible()
        page.goto(request_page)


def test_a_moment_of_another_year_says_its_year_and_shows_no_empty_figures(visit):
    page = visit("viewer", "/scaling/?at=2020-03-01T12:00:00")
    expect(page.get_by_text("Nothing was recorded near").first).to_contain_text("2020")
    expect(page.locator("dd").filter(has_text=re.compile(r"^,|, ,"))).to_have_count(0)
    expect(page.locator("time").first).to_have_attribute("data-local", "yes")
