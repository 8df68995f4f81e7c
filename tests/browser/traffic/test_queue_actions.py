"""What an operator does with waiting requests: in a queue where nothing moves by itself and in one that never rests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from playwright.sync_api import Page, WebSocketRoute, expect

from tests.browser.running.caller import busy, within
from tests.browser.running.stack import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.long(85)]

ROW = "[data-rows] tr:not(.space)"
CROWD = 400
REACHED_S = 20.0


@pytest.fixture
def waiting(stack, lane):
    """Requests behind one that goes on for minutes, on a model of their own. Answers come once this ends."""
    with busy(stack, lane):
        sent = stack.send(5, model=lane, slo_class="batch", max_tokens=3)
        yield sent
    for each in sent:
        each.result()


@pytest.fixture
def moving(stack):
    """A gateway where a hundred requests a second come and go."""
    ports = json.loads((stack.folder / "ports.json").read_text())
    command = [sys.executable, "-m", "tests.browser.running.crowd", f"redis://127.0.0.1:{ports['redis']}/0", str(CROWD)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "crowded\n"
    yield
    process.kill()
    process.wait()


def shown(page, text):
    """The queue with only those rows that have `text` in them."""
    page.get_by_label("Filter by tenant").fill(text)
    expect(page.locator("[data-shown]")).to_contain_text(" of ")  # else it waits for more to be typed
    expect(page.locator(ROW).filter(has_text=text).first).to_be_visible()
    expect(page.locator(ROW).filter(has_not_text=text)).to_have_count(0)


def tick(row):
    """Ticks whatever row that is by then, and says whose it is. At once: a pointer would wait until the row rests."""
    checked = row.page.locator(f"{ROW} input:checked")
    for _ in range(20):  # the row may leave the queue as it is ticked, or right after
        row.get_by_role("checkbox").dispatch_event("click")
        if found := checked.evaluate_all("boxes => boxes.map(box => box.value)"):
            return found[0]
    raise AssertionError("no row could be ticked")


def tell(page, button, said):
    page.get_by_role("button", name=button, exact=True).click()
    expect(page.locator("[data-answer]")).to_contain_text(said)


class Held:
    """Between the Queue page and the console: `hold` keeps back what is said of the queue, `let_go` hands it on."""

    def __init__(self, page: Page) -> None:
        self._page: WebSocketRoute | None = None
        self._kept: list[str | bytes] = []
        self._holding = False
        page.route_web_socket("**/ws/queue", self._between)

    def _between(self, page: WebSocketRoute) -> None:
        self._page = page
        page.connect_to_server().on_message(self._say)

    def _say(self, message: str | bytes) -> None:
        if self._holding:
            self._kept.append(message)
        else:
            assert self._page is not None
            self._page.send(message)

    def hold(self) -> None:
        self._holding = True

    def let_go(self) -> None:
        self._holding = False
        for message in self._kept:
            self._say(message)
        self._kept.clear()


# One task of the browser: the button is hit before the page stops waiting for more to be typed.
TYPE_AND_CANCEL = """(text) => {
  const filter = document.querySelector("[data-filter]");
  filter.value = text;
  filter.dispatchEvent(new Event("input", { bubbles: true }));
  document.querySelector('[data-act][value="cancel"]').click();
}"""


def cancel(page, said, question="Cancel this request?"):
    """Only cancelling asks before it is done."""
    page.get_by_role("button", name="Cancel requests", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(question)
    dialog.locator("[data-confirm-yes]").click()
    expect(page.locator("[data-answer]")).to_contain_text(said)


def ids(page):
    return page.locator(f'{ROW} [data-cell="id"]').all_inner_texts()


def test_waiting_requests_are_paused_resumed_given_a_priority_and_cancelled(visit, waiting, caller, lane):
    page = visit("operator", "/queue/")
    shown(page, lane)
    expect(page.locator(ROW)).to_have_count(5)
    chosen = tick(page.locator(ROW).nth(2))
    row = page.locator(ROW).filter(has_text=chosen)
    tell(page, "Pause", "1 paused")
    expect(row.locator('[data-cell="paused"]')).to_be_visible()
    assert tick(row) == chosen
    tell(page, "Resume", "1 resumed")
    expect(row.locator('[data-cell="paused"]')).to_be_hidden()
    assert tick(row) == chosen
    page.get_by_label("Priority", exact=True).fill("7")
    tell(page, "Change priority", "1 reprioritised")
    expect(row.locator('[data-cell="priority"]')).to_have_text("7")
    assert tick(row) == chosen
    page.get_by_role("button", name="Cancel requests", exact=True).click()
    expect(page.get_by_role("dialog")).to_contain_text("Cancel this request?")
    page.get_by_role("button", name="Go back").click()
    expect(row).to_have_count(1)
    cancel(page, "1 cancelled")
    expect(row).to_have_count(0)
    expect(page.locator(ROW)).to_have_count(4)
    for kind in ("pause", "resume", "reprioritise", "cancel"):
        (decision,) = caller.recorded(f"queue_{kind}", request_id=chosen)
        assert (decision["actor"], decision["outcome"]["applied"]) == ("operator", [chosen])
    page.goto("/audit/?kind=queue_pause")
    expect(page.locator("#audit-rows")).to_contain_text(f"operator paused {chosen}")


def test_two_at_once_are_cancelled_and_the_others_are_served(visit, stack, lane):
    page = visit("operator", "/queue/")
    with busy(stack, lane):
        sent = stack.send(4, model=lane, slo_class="batch", max_tokens=3)
        shown(page, lane)
        expect(page.locator(ROW)).to_have_count(4)
        for place in (0, 2):
            page.locator(ROW).nth(place).get_by_role("checkbox").check()
        expect(page.locator("[data-selected]")).to_contain_text("2 selected")
        cancel(page, "2 cancelled", "Cancel 2 requests?")
    assert sorted(each.result() == 200 for each in sent) == [False, False, True, True]


def test_all_that_match_are_paused_at_once_and_cancelled_after_a_question(visit, waiting, lane):
    page = visit("operator", "/queue/")
    shown(page, lane)
    expect(page.locator(ROW)).to_have_count(5)
    page.get_by_role("button", name="Select all 5 matching").click()
    tell(page, "Pause", "5 paused")
    page.get_by_role("button", name="Select all 5 matching").click()
    cancel(page, "5 cancelled", "Cancel all 5")
    expect(page.locator(ROW)).to_have_count(0)
    assert {each.result() for each in waiting} != {200}


def test_all_that_matched_are_cancelled_though_the_queue_is_unknown_at_the_answer(visit, waiting, caller, lane):
    """Another filter takes effect while the question is open, and nothing has come for it when it is answered."""
    page = visit("operator", "/fleet/")
    queue = Held(page)
    page.goto("/queue/")
    shown(page, lane)
    expect(page.locator(ROW)).to_have_count(5)
    page.get_by_role("button", name="Select all 5 matching").click()
    queue.hold()
    page.evaluate(TYPE_AND_CANCEL, "no such request")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f'Cancel all 5 waiting requests matching "{lane}"?')
    expect(page.locator("[data-all]")).to_have_text("Select all matching")  # how many is not known
    dialog.locator("[data-confirm-yes]").click()
    expect(page.locator("[data-answer]")).to_contain_text("5 cancelled")
    expect(page.locator("[data-progress]")).to_be_hidden()
    assert 200 not in {each.result() for each in waiting}
    outcome = caller.recorded("queue_cancel")[0]["outcome"]
    assert (outcome["of"], outcome["applied"]) == (5, 5)
    queue.let_go()
    expect(page.locator("[data-all]")).to_have_text("Select all 0 matching")


def test_commands_go_to_the_selected_requests_however_the_rows_move(visit, moving, caller):
    page = visit("operator", "/queue/")
    shown(page, "crowd")
    for _ in range(5):  # a quarter of the queue leaves each second, so what was selected may be gone on a slow machine
        chosen = tick(page.locator(ROW).nth(3))
        before = ids(page)
        within(REACHED_S, lambda before=before: ids(page) != before)
        page.get_by_role("button", name="Pause", exact=True).click()
        expect(page.locator("[data-answer]")).to_be_visible()
        if decisions := caller.recorded("queue_pause", request_id=chosen):
            break
    (decision,) = decisions
    assert decision["inputs"]["request_ids"] == [chosen]


def test_a_paused_view_keeps_its_rows_until_it_is_resumed(visit, moving):
    page = visit("operator", "/queue/")
    shown(page, "crowd")
    page.get_by_role("button", name="Pause updates").click()
    expect(page.locator("[data-table]")).not_to_have_attribute("aria-busy", "true")
    before = ids(page)
    expect(page.locator(f"{ROW}.left")).not_to_have_count(0)  # so the queue has moved since
    assert ids(page) == before
    page.get_by_role("button", name="Resume updates").click()
    within(REACHED_S, lambda: ids(page) != before)
    expect(page.locator(f"{ROW}.left")).to_have_count(0)
