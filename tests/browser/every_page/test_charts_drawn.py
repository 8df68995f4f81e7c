"""The Scaling chart as Plotly draws it: every mark inside the picture, whole instances on their axis."""

from __future__ import annotations

import itertools
import json
import mimetypes
from pathlib import Path

import pytest

from console.charts.base import scaling_load

pytestmark = pytest.mark.browser

STATIC = Path(__file__).resolve().parents[3] / "static"
BASE = "http://charts.test"
# The page's own modules around one chart: no console is needed to see how it is drawn.
DOCUMENT = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="/css/tokens.css">
<style>body { margin: 0 } .plot { height: 300px }</style>
<div class="chart" data-chart="policy"><div class="plot"></div><div class="empty" hidden></div></div>
<script src="/vendor/plotly-basic.min.js"></script><script id="charts" type="application/json">%s</script>
<script type="module" src="/js/pages/drawn.js"></script>"""
INSIDE = """() => {
  const plot = document.querySelector(".plot").getBoundingClientRect();
  const ground = document.querySelector(".nsewdrag").getBoundingClientRect();
  const marks = [...document.querySelectorAll(".scatterlayer .points path.point")];
  const inside = (at) => at.top >= plot.top && at.top + at.height / 2 >= ground.top - 1
    && at.bottom - at.height / 2 <= ground.bottom + 1;
  return marks.map((mark) => inside(mark.getBoundingClientRect()));
}"""
TICKS = """() => [...document.querySelectorAll(".y2tick text")].map((tick) => tick.textContent)"""
HOUR = 3600.0


@pytest.fixture
def drawn(engine):
    """`drawn(spec, width)`: a page with that chart, drawn."""
    contexts = []

    def answer(route):
        path = route.request.url.removeprefix(BASE).lstrip("/")
        kind = mimetypes.guess_type(path)[0] or "text/html"
        return route.fulfill(body=(STATIC / path).read_bytes(), content_type=kind)

    def draw(spec, width=1280):
        contexts.append(engine.new_context(viewport={"width": width, "height": 500}))
        page = contexts[-1].new_page()
        page.route(f"{BASE}/**", answer)
        body = DOCUMENT % json.dumps({"policy": spec})
        page.route(f"{BASE}/", lambda route: route.fulfill(body=body, content_type="text/html"))
        page.goto(f"{BASE}/")
        page.locator(".main-svg").first.wait_for()
        return page

    yield draw
    for each in contexts:
        each.close()


def chart(events=(), loads=(0.4, 0.9, 1.1), ready=(2.0, 2.0, 3.0)):
    times = [HOUR * (number + 1) / (len(loads) + 1) for number in range(len(loads))]
    return scaling_load(
        list(zip(times, loads, strict=True)), list(zip(times, ready, strict=True)), list(events), (0.8, 0.3),
        (0.0, HOUR), gap_s=HOUR,
    )  # fmt: skip


@pytest.mark.parametrize("width", [1280, 390])
def test_marks_of_a_load_far_above_the_axis_are_in_the_picture(drawn, width):
    loads = {"scale_out": (23.9, 11.35, 7.14, 0.9, 0.85), "scale_hold": (23.9, 2.0), "scale_in": (0.1,)}
    events = [
        (600.0 + 300 * number, kind, load, f"{kind} at {load}")
        for kind, each in loads.items()
        for number, load in enumerate(each)
    ]
    page = drawn(chart(events, loads=(0.4, 23.9, 1.1)), width)
    seen = page.evaluate(INSIDE)
    assert len(seen) == len(events)
    assert all(seen), seen
    said = page.evaluate("""() => document.querySelector(".plot").data
      .filter((trace) => trace.mode === "markers").flatMap((trace) => trace.customdata)""")
    assert any("2390 %" in each for each in said), "its true load, on hover"


def test_what_a_mark_says_on_hover_is_its_true_load(drawn):
    page = drawn(chart([(1800.0, "scale_out", 23.9, "scaled out")], loads=(0.4, 23.9, 1.1)))
    mark = page.locator(".scatterlayer .points path.point").first.bounding_box()
    page.mouse.move(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
    hover = page.locator(".hoverlayer")
    hover.get_by_text("scaled out").wait_for()
    assert "load 2390 %" in hover.text_content()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ready", [(0, 0, 0), (1, 0, 1), (2, 2, 2), (1, 2, 3), (4, 4, 2), (7, 9, 8), (11, 12, 13),
                                   (180, 200, 190)])  # fmt: skip
@pytest.mark.parametrize("width", [1280, 390])
def test_instances_are_counted_in_whole_steps_of_one_size(drawn, ready, width):
    page = drawn(chart(ready=[float(each) for each in ready]), width)
    ticks = page.evaluate(TICKS)
    numbers = [int(each) for each in ticks]
    steps = {later - sooner for sooner, later in itertools.pairwise(numbers)}
    assert len(numbers) >= 2
    assert len(numbers) <= 9
    assert len(steps) == 1, f"equally spaced on the screen, so equally far apart: {ticks}"
    assert steps.pop() >= 1
    assert (numbers[0], numbers[-1] <= max(*ready, 1) * 1.5) == (0, True)
    axis = page.evaluate("document.querySelector('.plot')._fullLayout.yaxis2.range")
    assert axis[0] <= 0
    assert axis[1] >= max(ready), "nothing of the line is outside"
