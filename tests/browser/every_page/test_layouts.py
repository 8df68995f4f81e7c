"""Where things stand, measured: names wrap and are not broken, controls stay in reach, every group has its name."""

from __future__ import annotations

import json
import mimetypes
import re

import pytest
from playwright.sync_api import expect

from console.charts.experiments import attainment
from tests.browser.every_page.looks import beyond, findings_in_both_schemes
from tests.browser.every_page.test_charts_drawn import BASE, STATIC

pytestmark = [pytest.mark.browser, pytest.mark.long(65)]

LONG, TITLE = "x" * 64, "T" * 120  # the longest that are allowed
BROKEN = """(holder) => {
  const broken = [];
  for (const cell of holder.querySelectorAll("th[scope=row]")) {
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      for (const word of walker.currentNode.data.matchAll(/[^\\s-]+/g)) {
        const range = document.createRange();
        range.setStart(walker.currentNode, word.index);
        range.setEnd(walker.currentNode, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) broken.push(word[0]);
      }
    }
  }
  return broken;
}"""
# As on a busy hour: large counts, and some requests that never got a first token.
CROWDED = """(table) => {
  for (const row of table.querySelectorAll("tbody tr")) {
    row.cells[1].textContent = "10,000";
    row.cells[4].append(Object.assign(document.createElement("span"),
      { className: "sub", textContent: "of 3,678, 2,109 with a first token" }));
  }
}"""
# As in a bad minute, and with high quotas. Measured in the same step, before live figures replace the texts.
WIDE = """(box) => {
  for (const row of box.querySelectorAll("tbody tr")) {
    const say = (name, text) => {
      for (const cell of row.querySelectorAll(`[data-cell=${name}]`)) cell.textContent = text;
    };
    for (const name of ["now-budget", "hour-budget", "budget"]) say(name, "18.2x the allowed misses");
    say("status", "below target");
    say("why", "timed out in the queue after its TTFT target had passed");
    for (const quota of row.querySelectorAll("td.num > .sub")) {
      if (/quota|limit/.test(quota.textContent)) quota.textContent = "quota 2,000,000";
    }
  }
  return box.scrollWidth - box.clientWidth;
}"""
# How far apart the labels, and the bottoms of the inputs, of one row of a form are, in px.
UNEVEN = """(form) => {
  const rows = new Map();
  for (const field of form.querySelectorAll(".field")) {
    const box = (which) => field.querySelector(which)?.getBoundingClientRect();
    const [label, input] = [box("label"), box("input, select")];
    const top = Math.round(field.getBoundingClientRect().bottom / 8);
    if (label && input) rows.set(top, [...(rows.get(top) ?? []), [label.top, input.bottom]]);
  }
  const apart = (numbers) => Math.max(...numbers) - Math.min(...numbers);
  return Math.max(...[...rows.values()].flatMap((row) => [0, 1].map((side) => apart(row.map((each) => each[side])))));
}"""
CHART = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="/css/tokens.css">
<style>body { margin: 0 } .chart { height: 17rem } .plot { height: 100%% }</style>
<div class="chart"><div class="plot"></div><div class="empty" hidden></div></div>
<script src="/vendor/plotly-basic.min.js"></script>
<script type="module">import { draw } from "/js/plots.js"; draw(document.querySelector(".chart"), %s);</script>"""


def right_edge(box):
    return box["x"] + box["width"]


@pytest.fixture
def long_class(caller):
    body = {"name": LONG, "title": TITLE, "ttft_s": 1, "tpot_s": 0.1, "tenant": None}
    made = caller.post("slo-classes", body)
    yield made
    caller.delete(f"slo-classes/{made['id']}", version=made["version"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [1280, 1440])
def test_a_long_name_wraps_and_leaves_every_class_its_actions(visit, long_class, width, shot):
    page = visit("operator", "/classes/", width)
    table = page.get_by_role("region", name="SLO classes")
    assert table.evaluate("(box) => box.scrollWidth - box.clientWidth") == 0
    assert beyond(page, width) == 0
    shot(page, f"classes-{width}")
    for link in page.get_by_role("link", name=re.compile("^Remove ")).all():
        assert right_edge(link.bounding_box()) <= right_edge(table.bounding_box())
    assert set(table.evaluate(BROKEN)) <= {LONG, TITLE}, "no other name is broken for it"


@pytest.mark.parametrize("path", ["/", "/tenants/"])
def test_the_last_column_is_in_sight_whatever_the_figures(visit, path):
    page = visit("operator", path, 1280)
    table = page.locator(".table-wrap").first
    expect(table.locator("tbody tr").first).to_be_visible()
    assert table.evaluate(WIDE) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", ["/goodput/", "/workflows/", "/requests/", "/audit/", "/experiments/"])
def test_fields_of_a_search_stand_on_one_line(visit, path, shot):
    page = visit("operator", path, 1280)
    form = page.get_by_role("search")
    assert form.evaluate(UNEVEN) < 1
    shot(page, f"search-{path.strip('/')}")
    buttons = [form.get_by_role(role, name=name) for role, name in (("button", "Search"), ("link", "Clear"))]
    tops = [button.bounding_box()["y"] for button in buttons if button.count()]
    assert len(set(tops)) == 1


@pytest.mark.thorough
def test_times_above_a_timeline_are_whole(visit, places, shot):
    page = visit("viewer", f"/requests/{places['missed']}/", 1280)
    timeline = page.locator(".timeline")
    shot(page, "timeline")
    assert timeline.evaluate("(box) => getComputedStyle(box).overflow") == "visible"


@pytest.mark.parametrize("width", [1024, 1280, 1440])
def test_what_one_can_do_with_experiments_stands_at_the_right_edge(visit, width, shot):
    page = visit("operator", "/experiments/", width)
    button, card = page.get_by_role("link", name="New experiment"), page.locator("main > .card").first
    box = button.bounding_box()
    assert abs(right_edge(box) - right_edge(card.bounding_box())) < 2
    shot(page, f"experiments-{width}")
    heading = page.locator(".page-head > div").bounding_box()
    assert box["y"] < heading["y"] + heading["height"], "on the heading's row"
    assert beyond(page, width) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [1280, 1440])
def test_a_preview_keeps_names_whole_and_says_when_it_is_of_earlier_values(visit, width, shot):
    page = visit("operator", "/classes/", width)
    page.get_by_role("link", name="Edit interactive").click()
    judged, simulated = page.locator("[data-judged]"), page.locator("[data-simulated]")
    field = page.get_by_label("TTFT")
    field.fill("0.015")
    expect(judged).to_contain_text("would be attained")
    page.get_by_role("button", name="Run simulation").click()
    table = page.get_by_role("region", name="Simulation result")
    expect(table).to_be_visible(timeout=30_000)
    table.evaluate(CROWDED)
    shot(page, f"preview-{width}")
    assert page.locator("[data-preview]").evaluate(BROKEN) == []
    assert table.evaluate("(box) => box.scrollWidth - box.clientWidth") == 0
    lines = "(cell) => cell.getBoundingClientRect().height / parseFloat(getComputedStyle(cell).lineHeight)"
    assert max(cell.evaluate(lines) for cell in table.locator("td .sub").all()) < 3.5
    expect(page.get_by_text("for earlier values")).to_have_count(0)
    field.fill("-4")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(judged).to_contain_text("This preview is for earlier values. Correct the marked fields.")
    expect(simulated).to_contain_text("This simulation is for earlier values. Run it again for the current ones.")
    colours = "(cell) => getComputedStyle(cell).color === getComputedStyle(document.querySelector('.note')).color"
    assert judged.locator("strong").first.evaluate(colours)
    assert table.locator("td").first.evaluate(colours)
    shot(page, f"earlier-{width}")
    assert findings_in_both_schemes(page, "light") == []
    field.fill("0.015")
    expect(page.get_by_text("for earlier values")).to_have_count(0)
    expect(judged).to_contain_text("would be attained")
    expect(table).to_be_visible()


@pytest.fixture
def shot(tmp_path_factory):
    """Pictures of what was measured, for who wants to look; kept for the session."""
    folder = tmp_path_factory.mktemp("layouts")

    def take(page, name):
        page.screenshot(path=str(folder / f"{name}.png"), full_page=True)

    return take


NAMES = ["batch", "chat", "code-completion", "interactive", "priority-0", "priority-1", "standard", "summarisation"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("names", [NAMES, [*NAMES[:-1], "a" * 64], ["", *(f"priority-{n}" for n in range(20))]])
@pytest.mark.parametrize("width", [1200, 500, 330])
def test_every_group_of_bars_has_its_name(engine, names, width, shot):
    by_class = dict.fromkeys(names, 0.9)
    entries = [
        {"policy": policy, "attainment": 0.9, "by_class": by_class, "attainment_spread": (0.9, 0.9)}
        for policy in ("slackline", "round robin")
    ]
    spec = attainment(entries, names, {}, 0.95)
    context = engine.new_context(viewport={"width": width, "height": 400})
    page = context.new_page()

    def answer(route):
        path = route.request.url.removeprefix(BASE).lstrip("/")
        if not path:
            return route.fulfill(body=CHART % json.dumps(spec), content_type="text/html")
        return route.fulfill(body=(STATIC / path).read_bytes(), content_type=mimetypes.guess_type(path)[0])

    page.route(f"{BASE}/**", answer)
    page.goto(f"{BASE}/")
    page.locator(".main-svg").first.wait_for()
    page.wait_for_function("document.querySelectorAll('.xtick text').length > 0")
    shot(page, f"groups-{width}-{len(names)}-{len(max(names))}")
    ticks = page.locator(".xtick text")
    assert ticks.all_text_contents() == spec["layout"]["xaxis"]["ticktext"]
    assert all(tick.is_visible() for tick in ticks.all())
    bottom = page.locator(".plot").bounding_box()
    boxes = [tick.bounding_box() for tick in ticks.all()]
    assert max(box["y"] + box["height"] for box in boxes) <= bottom["y"] + bottom["height"] + 1
    ground = page.locator(".nsewdrag").bounding_box()
    assert ground["height"] > 90, "the bars keep room"
    context.close()
