"""Figures that say what they are of: whose first tokens, which window a cost is of, and when a look was the last."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from tests.browser.running.caller import PROFILE, engine_of_its_own, within

pytestmark = pytest.mark.browser

HOUR_S = 3600
MODEL = "looked-at"


def number(text):
    return float(re.search(r"[\d,]+(\.\d+)?", text)[0].replace(",", ""))


def row_of(page, slo_class, tenant="demo"):
    rows = page.locator("[data-classes] tr")
    for cell, text in (("name", slo_class), ("tenant", tenant)):
        rows = rows.filter(has=page.locator(f"[data-cell='{cell}']").get_by_text(text, exact=True))
    return rows


def test_an_hour_costs_what_is_provisioned_now_and_each_attained_its_part_of_the_last(visit, caller):
    """Also after the page has been told of it again, without being loaded again."""

    def provisioned():
        there = [each for each in caller.get("instances", limit=200)["items"]
                 if each["observed_state"] not in ("pending", "stopped", "failed")]  # fmt: skip
        return sum(each["unit_cost"] for each in there) * HOUR_S, len(there)

    def attained():
        return sum(each["attained"] for each in caller.get("attainment", window="hour")["items"])

    page = visit("viewer")
    cost, whose, hour = (
        page.locator(f'[data-history="{name}"]') for name in ("cost_per_hour", "cost_whose", "cost_hour")
    )

    def agrees():
        page.reload()
        (wanted, count), said = provisioned(), number(cost.inner_text())
        return said == wanted and f"{count} instance" in whose.inner_text()

    within(30, agrees)  # one may be started or stopped by the scaler just now
    before = attained()
    page.reload()
    words = r"last hour: ([\d,.]+) units, ([\d,.]+) units per attained request"
    spent, each = (number(text) for text in re.fullmatch(words, hour.inner_text()).groups())
    assert before * 0.97 <= spent / each <= attained() * 1.03, "one window; figures are rounded"
    with page.expect_response("**/overview/history/", timeout=25_000) as told:
        pass
    expect(cost).to_have_text(f"{told.value.json()['cost_per_hour']:,.0f}")


def test_the_times_to_the_first_token_say_whose_they_are(visit, stack):
    """Streamed and served; in one piece; and refused: each is counted where it belongs."""
    page = visit("viewer")
    body = {"model": stack.credentials["model"], "prompt": "Hello", "max_tokens": 5, "slo_class": "batch"}
    for each in stack.send(3, max_tokens=5, slo_class="batch"):
        assert each.result() == 200
    cell = row_of(page, "batch").locator('[data-cell="ttft-counted"]')
    expect(cell).to_have_text(re.compile("not streamed"))
    with stack.ask({**body, "stream": True}, stream=True) as answer:
        assert answer.status_code == 200
        assert b"[DONE]" in b"".join(answer.iter_content(None))
    expect(cell).to_have_text(re.compile(r"^[1-9]\d* of \d+ requests; \d+ not streamed"))
    expect(row_of(page, "batch").locator('[data-cell="ttft"]')).to_have_text(re.compile(r"\d.* / \d"))
    page.reload()
    expect(cell).to_have_text(re.compile(r"^[1-9]\d* of \d+ requests; \d+ not streamed"))


@pytest.mark.thorough
def test_a_policy_that_is_switched_off_shows_no_old_load_as_now(visit, caller):
    instance = engine_of_its_own(caller, MODEL)
    page = visit("operator", "/scaling/new/")
    page.get_by_label("Model").select_option(label=MODEL)
    page.get_by_label("Minimum instances").fill("1")
    page.get_by_role("button", name="Create policy").click()
    card = page.get_by_role("region", name=f"{MODEL}, ").first
    expect(card.locator(".why-now")).to_contain_text("Now: load", timeout=30_000)
    facts = card.locator("dl.facts > div")
    expect(facts.filter(has_text="Load now").locator("dd")).to_have_text(re.compile(r"^\d+ % of capacity$"))
    page.get_by_role("link", name=f"Edit {MODEL}/collocated").click()
    page.get_by_label("Enabled").uncheck()
    page.get_by_role("button", name="Save").click()
    expect(card.locator(".why-now")).to_contain_text("This policy is disabled and not evaluated.")
    expect(facts.filter(has_text="Load now").locator("dd")).to_have_text("– not evaluated")
    expect(facts.filter(has_text="Ready, starting").locator("dd")).to_have_text("1, 0, 0")
    caller.post(f"instances/{instance}/stop", {"version": caller.get(f"instances/{instance}")["version"]})
    expect(facts.filter(has_text="Ready, starting").locator("dd")).to_have_text("0, 0, 0", timeout=60_000)
    expect(card.locator(".why-now")).to_contain_text("1 ready, 0 starting, 0 draining")
    drawn = json.loads(card.locator(".plot").evaluate("(plot) => JSON.stringify(plot._fullLayout.yaxis2.dtick)"))
    assert drawn == 1


def test_an_instance_on_a_shipped_profile_says_so(visit, caller):
    (first, *_) = caller.get("instances", model="demo", observed_state="ready")["items"]
    page = visit("viewer", f"/fleet/instances/{first['id']}/")
    note = page.get_by_role("region", name="Latency model").locator(".section-head .note")
    expect(note).to_contain_text(f"Shipped profile {PROFILE}")
    expect(note).not_to_contain_text("samples")
