"""Ten thousand waiting requests: the browser holds and gets the rows in view, and those of a dead gateway go."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.running.stack import ROOT, Stack

pytestmark = [pytest.mark.browser, pytest.mark.long(95)]

ROWS = 10_000
HELD_MAX = 200  # elements; as many as a browser may ask for at once
FRAME_MAX = 80_000  # bytes: rows in view, not ten thousand
LONGEST_TASK_MS = 250  # of the page's own processor time
ROW = "[data-rows] tr:not(.space)"


@pytest.fixture(scope="module")
def crowds() -> Iterator[list[subprocess.Popen[str]]]:
    """Those that were started. They end with the module: ten thousand requests take seconds to arrive."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def crowd(stack: Stack, crowds: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """One that runs; another one after a test that killed it."""
    if crowds and crowds[-1].poll() is None:
        return crowds[-1]
    ports = json.loads((stack.folder / "ports.json").read_text())
    command = [sys.executable, "-m", "tests.browser.running.crowd", f"redis://127.0.0.1:{ports['redis']}/0", str(ROWS)]
    crowds.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    output = crowds[-1].stdout
    assert output is not None
    assert output.readline() == "crowded\n"
    return crowds[-1]


def row_numbers(page):
    return [int(each) for each in page.locator(ROW).evaluate_all("(rows) => rows.map((row) => row.ariaRowIndex)")]


def scroll_to(page, share):
    page.locator("[data-scroll]").evaluate("(box, share) => { box.scrollTop = box.scrollHeight * share; }", share)


def covered(page):
    """Whether every place in view has its row: no gap below the head or at the lower edge of the box."""
    return page.evaluate(
        """() => { const box = document.querySelector("[data-scroll]").getBoundingClientRect();
             const head = document.querySelector("[data-head]").getBoundingClientRect();
             const rows = [...document.querySelectorAll("[data-rows] tr:not(.space)")];
             const [first, last] = [rows[0], rows.at(-1)].map((row) => row.getBoundingClientRect());
             const top = Math.max(head.bottom, box.top + head.height);
             return first.top <= top + 2 && last.bottom >= box.bottom - 60; }"""
    )


def longest_task_ms(trace: dict[str, Any]) -> float:
    """Processor time of the longest task that a page's main thread ran."""
    events = trace["traceEvents"]
    named = [each for each in events if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain"]
    mains = {(each["pid"], each["tid"]) for each in named}
    return max(each.get("tdur", 0) for each in events if (each["pid"], each["tid"]) in mains) / 1000


def test_ten_thousand_rows_are_a_window_that_follows_the_scroll_bar(visit, crowd):
    page = visit("operator", "/fleet/")
    sizes: list[int] = []
    page.on("websocket", lambda socket: socket.on("framereceived", lambda text: sizes.append(len(text))))
    page.goto("/queue/")
    expect(page.locator("[data-total]")).to_have_text(re.compile(r"^(9,9|10,0)\d\d$"))
    expect(page.locator("[data-table]")).to_have_attribute("aria-rowcount", re.compile(r"^(99|100)\d\d$"))
    for share, first, last in ((0.5, 4000, 6000), (1.0, 9700, 10_100), (0.0, 2, 200)):
        scroll_to(page, share)
        page.wait_for_function(
            "([first, last]) => { const row = document.querySelector('[data-rows] tr:not(.space)');"
            " return row && Number(row.ariaRowIndex) >= first && Number(row.ariaRowIndex) <= last; }",
            arg=[first, last],
        )
        assert covered(page), share
        assert len(row_numbers(page)) <= HELD_MAX
    assert row_numbers(page) == sorted(row_numbers(page))
    assert max(sizes) < FRAME_MAX
    assert page.evaluate("document.querySelectorAll('*').length") < 6000


def test_it_stays_smooth_while_a_hundred_a_second_come_and_go(visit, engine, crowd):
    """No task of the page holds up its frames for long. In processor time: others on the machine cost a page frames."""
    page = visit("viewer", "/queue/")
    expect(page.locator(ROW).first).to_be_visible()
    engine.start_tracing(page=page, categories=["toplevel"])
    frames = page.evaluate(
        """async () => { let frames = 0; const end = performance.now() + 5000;
             const box = document.querySelector("[data-scroll]");
             while (performance.now() < end) {
               box.scrollTop += 40;
               await new Promise(requestAnimationFrame);
               frames += 1;
             }
             return frames; }"""
    )
    longest_ms = longest_task_ms(json.loads(engine.stop_tracing()))
    print(f"{frames} frames, longest task {longest_ms:.0f} ms of processor time")
    assert 0 < longest_ms < LONGEST_TASK_MS


def test_a_selection_survives_scrolling_and_filters_are_the_servers(visit, crowd):
    page = visit("operator", "/queue/")
    expect(page.locator(ROW).first).to_be_visible()
    page.get_by_role("button", name="Pause updates").click()
    page.locator(ROW).nth(3).get_by_role("checkbox").check()
    chosen = page.locator(ROW).nth(3).locator('[data-cell="id"]').inner_text()
    scroll_to(page, 0.5)
    expect(page.locator(ROW).filter(has_text=chosen)).to_have_count(0)
    expect(page.locator("[data-selected]")).to_have_text("1 selected")
    scroll_to(page, 0.0)
    expect(page.locator(ROW).filter(has_text=chosen).get_by_role("checkbox")).to_be_checked()
    page.get_by_role("button", name="Resume updates").click()
    page.get_by_label("Filter by tenant").fill("summaries")
    expect(page.locator("[data-shown]")).to_have_text(re.compile(r"^3,\d\d\d of (9,9|10,0)\d\d waiting$"))
    expect(page.locator(ROW).first.locator('[data-cell="class"]')).to_have_text("summaries")
    starts = page.locator(ROW).first.locator('[data-cell="start"]')
    expect(starts).to_have_text(re.compile(r"^in [\d.]+ (ms|s|min)$"))


def test_a_gateway_that_dies_takes_its_rows_with_it(visit, crowd):
    page = visit("viewer", "/queue/")
    expect(page.locator("[data-total]")).to_have_text(re.compile(r"^(9,9|10,0)\d\d$"))
    crowd.kill()
    crowd.wait()
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "stale", timeout=15_000)
    expect(page.locator("[data-total]")).to_have_text(re.compile(r"^\d{1,3}$"), timeout=15_000)
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live", timeout=15_000)
