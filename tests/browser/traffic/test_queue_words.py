"""What the Queue page says in words: when a request starts or gives up, and what is true where no engine is."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.every_page.looks import beyond, serious_findings
from tests.browser.running.caller import busy, engine_of_its_own, within

pytestmark = [pytest.mark.browser, pytest.mark.long(85)]

ROW = "[data-rows] tr:not(.space)"
TIME = r"[\d.]+ (ms|s|min)"
GIVES_UP = re.compile(f"^times out in {TIME}$")
LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
WAITS_S = 100


@pytest.fixture
def late(stack, caller, lane):
    """A real request that waits behind one that runs for minutes, its promised first token soon out of reach."""
    with busy(stack, lane):
        sent = stack.send(1, model=lane, target_ttft=1.0, waiting_time=WAITS_S, max_tokens=20)
        yield lane
    assert [each.result() for each in sent] == [200]  # served last, once there is room
    within(10, lambda: all(row["model"] != lane for row in caller.get("queue")["items"]))  # nor seen by the next test


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_request_that_is_too_late_says_so_and_when_it_gives_up(visit, late, width, scheme):
    """In a real gateway's queue, in words that need no mouse; on every screen, read by everybody."""
    page = visit("operator", f"/queue/?text=model:{late}", width, scheme)
    row = page.locator(ROW)
    expect(row.locator('[data-cell="start"]')).to_have_text("too late")
    ends = row.locator('[data-cell="ends"]')
    expect(ends).to_have_text(GIVES_UP)
    ends.scroll_into_view_if_needed()
    expect(ends).to_be_in_viewport(ratio=0.9)
    assert fits(ends)
    left = [re.search(r"[\d.]+", each)[0] for each in (until(page), until(page, after_ms=1500))]
    assert WAITS_S > float(left[0]) > float(left[1]) > 0
    assert serious_findings(page) == []
    assert beyond(page, width) == 0


def fits(element):
    """Within the cell that holds it."""
    return element.evaluate(
        """(text) => { const range = document.createRange(); range.selectNodeContents(text);
             return range.getBoundingClientRect().right <= text.closest("td").getBoundingClientRect().right; }"""
    )


def until(page, after_ms=0):
    page.wait_for_timeout(after_ms)
    return page.locator(ROW).locator('[data-cell="ends"]').inner_text()


def test_a_paused_request_shows_when_it_times_out_too(visit, late):
    page = visit("operator", f"/queue/?text=model:{late}")
    row = page.locator(ROW)
    row.get_by_role("checkbox").check()
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(row.get_by_text("paused")).to_be_visible()
    expect(row.locator('[data-cell="start"]')).to_have_text("")
    expect(row.locator('[data-cell="ends"]')).to_have_text(GIVES_UP)
    row.get_by_role("checkbox").check()
    page.get_by_role("button", name="Resume", exact=True).click()
    expect(row.get_by_text("paused")).to_be_hidden()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, ["in 2.00 s", "", False]),
        ({"due_at": 101.0}, ["in 2.00 s", "", True]),
        ({"gives_up_at": 101.5}, ["in 2.00 s", "times out in 1.50 s", True]),
        ({"start_at": None}, ["unknown", "times out in 9.00 s", False]),
        ({"start_at": None, "hopeless": True}, ["too late", "times out in 9.00 s", True]),
        ({"start_at": None, "hopeless": True, "gives_up_at": 99.0}, ["too late", "timing out", True]),
        ({"start_at": None, "paused": True, "hopeless": True}, ["", "times out in 9.00 s", False]),
    ],
)
def test_what_is_known_of_a_start_in_words(tab, row, said):
    page = tab("viewer")
    page.goto("/classes/")
    known = {"paused": False, "hopeless": False, "start_at": 102.0, "due_at": 105.0, "gives_up_at": 109.0, **row}
    found = page.evaluate(
        """async (row) => { const { startWords } = await import("/static/js/start.js");
             const { text, ends, late } = startWords(row, 100); return [text, ends, late]; }""",
        known,
    )
    assert found == said


def test_a_gateway_of_before_leaves_the_end_out(tab):
    page = tab("viewer")
    page.goto("/classes/")
    row = {"paused": False, "hopeless": True, "start_at": None, "due_at": 99.0}
    found = page.evaluate(
        "async (row) => (await import('/static/js/start.js')).startWords(row, 100)",
        row,
    )
    assert found == {"text": "too late", "ends": "", "late": True}


@pytest.mark.thorough
def test_what_becomes_of_requests_is_said_once_their_engine_is_gone(visit, stack, caller):
    """As the gateway answers them. While others have engines it is a line, and an empty queue promises nothing."""
    model = "leaving"
    instance = engine_of_its_own(caller, model)
    pages = [visit("viewer", "/queue/", *look) for look in LOOKS]
    idle = pages[0].locator("[data-empty] span")
    expect(idle).to_have_text(re.compile(f"^Requests for .*{model}.* go straight to an engine|^Requests go "))
    caller.post(f"instances/{instance}/stop", {"version": caller.get(f"instances/{instance}")["version"]})
    within(30, lambda: stack.ask({"model": model, "prompt": "Hello", "max_tokens": 1}).status_code == 503)
    for page, (width, _) in zip(pages, LOOKS, strict=True):
        said = page.locator("[data-engines]")
        expect(said).to_contain_text(re.compile(rf"No engine for [\w, -]*{model}\b[\w, -]* is up or starting"))
        expect(said).to_contain_text("refused immediately (503, no_capacity)")
        assert serious_findings(page) == []
        assert beyond(page, width) == 0
    expect(idle).to_have_text(re.compile("^Requests for (?!.*leaving).* go straight to an engine"))


@pytest.mark.parametrize(
    ("capacity", "text", "unserved", "idle"),
    [
        ({}, "", False, ""),
        ({"a": "up"}, "", False, "Requests go straight to an engine while the fleet has capacity."),
        (
            {"a": "none"},
            "No engine for a is up or starting. Requests for this model are refused immediately (503, no_capacity).",
            True,
            "",
        ),
        (
            {"a": "up", "b": "coming"},
            "No engine for b is up yet, but one is starting or asleep. Requests wait here for it, or are refused if "
            "their waiting time is too short.",
            False,
            "Requests for a go straight to an engine while the fleet has capacity.",
        ),
        (
            {"a": "on_demand"},
            "No engine for a is up. The next request for this model has one started and waits here for it, as long as "
            "its waiting time allows.",
            True,
            "",
        ),
        (
            {"a": "undecoded"},
            "No decode engine for a is up, only prefill engines. Requests are prefilled, then wait outside this queue "
            "for a decode engine and are refused after their waiting time, or 30 seconds.",
            True,
            "",
        ),
    ],
)
def test_whether_engines_take_what_comes_in_words(tab, capacity, text, unserved, idle):
    page = tab("viewer")
    page.goto("/classes/")
    found = page.evaluate(
        "async (said) => (await import('/static/js/capacity.js')).capacityWords(said)",
        capacity,
    )
    assert found == {"text": text, "unserved": unserved, "idle": idle}
    many = page.evaluate(
        "async (said) => (await import('/static/js/capacity.js')).capacityWords(said).text",
        {f"m{n}": "none" for n in range(8)},
    )
    assert many.startswith("No engine for m0, m1, m2, m3, m4 and 3 more is up or starting. Requests for these models ")
