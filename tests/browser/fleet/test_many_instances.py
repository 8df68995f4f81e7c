"""A fleet of many engines on the Fleet page: its table is read a page at a time, and found in as a whole."""

from __future__ import annotations

import itertools
import re

import pytest
from playwright.sync_api import expect

from tests.browser.every_page.looks import beyond, serious_findings
from tests.browser.running.caller import within

pytestmark = [pytest.mark.browser, pytest.mark.long(65)]

MANY, MODEL = 28, "many"  # more than two pages of a narrow screen and one of a wide one
NARROW_ROWS, WIDE_ROWS = 10, 25
SHOWN = "[data-instance-rows] > tr:visible"
LINKS = 9  # more than are laid open
HOSTS = [f"many-{number:02}" for number in range(LINKS + 1)]


@pytest.fixture(scope="module")
def many(caller):
    """Engines that nobody started: registered, and not reached. They end with the module."""
    caller.post("models", {"name": MODEL, "context_tokens": 8192})
    for name in HOSTS:
        caller.post("hosts", {"name": name})
    for source, target in itertools.pairwise(HOSTS):
        medium = {"medium": "rdma", "bandwidth_bytes_s": 12.5e9, "latency_s": 5e-6}
        caller.post("links", {"source": source, "target": target, **medium})
    body = {"model": MODEL, "backend": "vllm", "provisioner": "static", "max_num_seqs": 8}
    ids = [f"{MODEL}-{number:03}" for number in range(MANY)]
    for number, name in enumerate(ids):
        caller.post("instances", {**body, "id": name, "url": f"http://127.0.0.1:9/{number}", "host": HOSTS[number % 4]})
    yield ids
    for name in ids:
        caller.post(f"instances/{name}/stop", {"version": caller.get(f"instances/{name}")["version"]})
    within(60, lambda: not caller.get("instances", model=MODEL, live="true")["items"])


def first_shown(page):
    return page.locator(SHOWN).first.get_attribute("data-key")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_turns_the_pages_of_the_table(visit, many, scheme):
    page = visit("viewer", "/fleet/", 390, scheme)
    expect(page.locator(SHOWN)).to_have_count(NARROW_ROWS)
    said = page.locator("[data-page-shown]")
    expect(said).to_have_text(re.compile(rf"^1 to {NARROW_ROWS} of \d+ instances$"))
    expect(page.get_by_role("button", name="Previous")).to_be_disabled()
    table = page.locator("[data-instance-rows]").bounding_box()
    assert table is not None
    assert table["height"] < 6000
    assert serious_findings(page) == []
    assert beyond(page, 390) == 0
    page.get_by_role("button", name="Next").focus()
    page.keyboard.press("Enter")
    expect(said).to_have_text(re.compile(rf"^{NARROW_ROWS + 1} to {2 * NARROW_ROWS} of \d+ instances$"))
    expect(page.get_by_role("heading", name="Instances", exact=True)).to_be_focused()
    expect(page.get_by_role("heading", name="Instances", exact=True)).to_be_in_viewport()
    with page.expect_response(re.compile("/live/")):  # and stays there when it moves
        pass
    expect(page.locator(SHOWN)).to_have_count(NARROW_ROWS)
    expect(said).to_have_text(re.compile(rf"^{NARROW_ROWS + 1} to {2 * NARROW_ROWS} of \d+ instances$"))
    page.reload()
    expect(said).to_have_text(re.compile(f"^{NARROW_ROWS + 1} to "))
    there = first_shown(page)  # which are on the first page may have changed: engines come and go
    page.get_by_role("button", name="Previous").click()
    expect(said).to_have_text(re.compile(f"^1 to {NARROW_ROWS} of "))
    expect(page.get_by_role("button", name="Previous")).to_be_disabled()
    assert first_shown(page) != there


def test_every_instance_is_on_one_page_of_a_wide_screen_and_found_on_any(visit, many):
    page = visit("viewer", "/fleet/")
    expect(page.locator(SHOWN)).to_have_count(WIDE_ROWS)
    seen = []
    while True:
        seen += page.locator(SHOWN).evaluate_all("(rows) => rows.map((row) => row.dataset.key)")
        if page.get_by_role("button", name="Next").is_disabled():
            break
        page.get_by_role("button", name="Next").click()
    assert len(seen) == len(set(seen))
    assert set(many) <= set(seen)
    page.locator("[data-fleet-filter]").fill(many[-1])
    expect(page.locator(SHOWN)).to_have_count(1)
    expect(page.get_by_role("navigation", name="Pages of instances")).to_have_count(0)
    page.locator("[data-fleet-filter]").fill(MODEL)
    expect(page.locator("[data-page-shown]")).to_have_text(f"1 to {WIDE_ROWS} of {MANY} instances")
    page.goto("/fleet/?page=99")
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    expect(page.locator(SHOWN).first).to_be_visible()


def test_many_links_are_folded_and_stay_open_once_opened(visit, many):
    page = visit("viewer", "/fleet/", 390)
    section = page.get_by_role("region", name="Host links", exact=True)
    expect(section.locator("summary")).to_have_text(f"{LINKS} links between hosts, all up")
    expect(section.get_by_role("table")).to_be_hidden()
    section.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(section.get_by_role("table")).to_be_visible()
    for _ in range(2):
        with page.expect_response(re.compile("/live/")):
            pass
    expect(section.get_by_role("table")).to_be_visible()
    assert serious_findings(page) == []


@pytest.mark.thorough
def test_without_script_the_table_scrolls_in_a_box(engine, stack, signed_in, many):
    context = engine.new_context(
        base_url=stack.console,
        viewport={"width": 390, "height": 900},
        storage_state=signed_in["viewer"],
        java_script_enabled=False,
    )
    page = context.new_page()
    page.goto("/fleet/")
    box = page.get_by_role("region", name="Instances", exact=True).locator(".table-wrap").bounding_box()
    assert box is not None
    assert box["height"] <= 720
    last = page.locator("[data-instance-rows] > tr").last
    last.scroll_into_view_if_needed()
    expect(last).to_be_in_viewport()
    context.close()
