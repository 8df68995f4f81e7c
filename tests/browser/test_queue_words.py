"""What the Queue page says in words: when a request starts or gives up, and what is true where no engine is."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.caller import busy, engine_of_its_own, within
from tests.browser.looks import beyond, serious_findings

pytestmark = pytest.mark.browser

ROW = "[data-rows] tr:not(.space)"
TIME = r"[\d.]+ (ms|s|min)"
GIVES_UP = re.compile(f"^gives up in {TIME}$")
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


def test_one_that_is_held_back_says_when_it_gives_up_too(visit, late):
    page = visit("operator", f"/queue/?text=model:{late}")
    row = page.locator(ROW)
    row.get_by_role("checkbox").check()
    page.get_by_role("button", name="Hold back", exact=True).click()
    expect(row.get_by_text("held back")).to_be_visible()
    expect(row.locator('[data-cell="start"]')).to_have_text("")
    expect(row.locator('[data-cell="ends"]')).to_have_text(GIVES_UP)
    row.get_by_role("checkbox").check()
    page.get_by_role("button", name="Let go on", exact=True).click()
    expect(row.get_by_text("held back")).to_be_hidden()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, ["in 2.00 s", "", False]),
        ({"due_at": 101.0}, ["in 2.00 s", "", True]),
        ({"gives_up_at": 101.5}, ["in 2.00 s", "gives up in 1.50 s", True]),
        ({"start_at": None}, ["not known", "gives up in 9.00 s", False]),
        ({"start_at": None, "hopeless": True}, ["too late", "gives up in 9.00 s", True]),
        ({"start_at": None, "hopeless": True, "gives_up_at": 99.0}, ["too late", "gives up now", True]),
        ({"start_at": None, "paused": True, "hopeless": True}, ["", "gives up in 9.00 s", False]),
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


def test_what_becomes_of_requests_is_said_once_their_engine_is_gone(visit, stack, caller):
    """As the gateway answers them. While others have engines it is a line, and an empty queue promises nothing."""
    model = "leaving"
    instance = engine_of_its_own(caller, model)
    pages = [visit("viewer", "/queue/", *look) for look in LOOKS]
    idle = pages[0].locator("[data-empty] span")
    expect(idle).to_have_text(
        re.compile(f"^Requests of .*{model}.* go to an engine as soon as they arrive|^Requests go ")
    )
    caller.post(f"instances/{instance}/stop", {"version": caller.get(f"instances/{instance}")["version"]})
    within(30, lambda: stack.ask({"model": model, "prompt": "Hello", "max_tokens": 1}).status_code == 503)
    for page, (width, _) in zip(pages, LOOKS, strict=True):
        said = page.locator("[data-engines]")
        expect(said).to_contain_text(re.compile(rf"No engine of [\w, -]*{model}\b[\w, -]* is up or on its way"))
        expect(said).to_contain_text("refused at once (503, no_capacity)")
        assert serious_findings(page) == []
        assert beyond(page, width) == 0
    expect(idle).to_have_text(re.compile("^Requests of (?!.*leaving).* go to an engine"))


@pytest.mark.parametrize(
    ("capacity", "text", "nobody", "idle"),
    [
        ({}, "", False, ""),
        ({"a": "up"}, "", False, "Requests go to an engine as soon as they arrive while the fleet has room."),
        (
            {"a": "none"},
            "No engine of a is up or on its way: what arrives for it is refused at once (503, no_capacity).",
            True,
            "",
        ),
        (
            {"a": "up", "b": "coming"},
            "No engine of b is up, but one is asleep or on its way: what arrives waits here for it, or is refused "
            "where it may not wait so long.",
            False,
            "Requests of a go to an engine as soon as they arrive while the fleet has room.",
        ),
        (
            {"a": "undecoded"},
            "Of a engines that prefill are up, but none that decodes: what arrives is computed, waits for one "
            "(not here: its prompt is sent) and is refused after its waiting time, or half a minute.",
            True,
            "",
        ),
    ],
)
def test_whether_engines_take_what_comes_in_words(tab, capacity, text, nobody, idle):
    page = tab("viewer")
    page.goto("/classes/")
    found = page.evaluate(
        "async (said) => (await import('/static/js/capacity.js')).capacityWords(said)",
        capacity,
    )
    assert found == {"text": text, "nobody": nobody, "idle": idle}
    many = page.evaluate(
        "async (said) => (await import('/static/js/capacity.js')).capacityWords(said).text",
        {f"m{n}": "none" for n in range(8)},
    )
    assert many.startswith("No engine of m0, m1, m2, m3, m4 and 3 more is up or on its way: what arrives for them ")
