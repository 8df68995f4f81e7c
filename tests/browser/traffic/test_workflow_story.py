"""One workflow, forked, killed and resumed by `make workflow-story`, and followed on its page to its deadline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Locator, Page, expect

from benchmarks.workflows.story import Story, place_of

pytestmark = [pytest.mark.browser, pytest.mark.long(35)]
DEADLINE_S = 15.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as found:
        yield found


def fact(page: Page, name: str) -> Locator:
    return page.locator("dl.facts > div", has=page.get_by_text(name, exact=True)).locator("dd")


def test_a_workflow_is_followed_through_a_fork_and_a_killed_client_to_its_deadline(visit, stack, pool):
    lines: list[str] = []
    story = Story(place_of(stack.folder), lines.append, DEADLINE_S)
    page = visit("viewer", "/workflows/")
    telling = pool.submit(story.tell)
    row = page.get_by_role("link", name=story.workflow)
    for _ in range(160):  # the list is kept for two seconds
        if row.count() or telling.done():
            break
        page.wait_for_timeout(250)
        page.reload()
    if not row.count() and telling.done():
        telling.result()  # says why it ended early
    row.click()
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    expect(fact(page, "State")).to_have_text("open")
    found = telling.result()
    told = "\n".join(lines)
    assert found["resumed_steps"] >= 2, told
    assert found["resumed_tokens_new"] == 0, told
    assert max(found["prefill_tokens"]) * 10 < min(found["prompt_tokens"]), told
    assert found["from_checkpoint"] == len(found["prefill_tokens"]), told
    assert (found["engine_calls"], found["leaked_blocks"], found["in_time"]) == (1, 0, True), told
    assert found["left_s"] > 0, told

    # Nothing is loaded again from here on: the page asks by itself.
    requests = page.locator("#workflow-requests")
    expect(requests).to_contain_text("write")
    expect(requests.get_by_text(re.compile(r"^stored answer \(request 1\): no new tokens$"))).to_have_count(1)
    expect(
        requests.get_by_text(re.compile(r"^answer of an equal request \(request \d+\): no new tokens$"))
    ).to_have_count(1)
    expect(requests.get_by_text(re.compile("^branch, from its checkpoint: ")).first).to_be_visible()
    given_up = requests.get_by_text("not counted: its client hung up, and can ask for this step again")
    expect(given_up.first).to_be_visible()
    expect(fact(page, "Result")).to_have_text(re.compile("in time"))
    drawn = page.get_by_role("group", name=re.compile("^Requests of the workflow"))
    for mark in ("kept", "shared", "branch", "given up"):
        expect(drawn.get_by_text(mark, exact=True).first).to_be_visible()
    stages = page.locator("#workflow-stages")
    for stage in ("plan", "explore", "check", "write"):
        expect(stages.get_by_role("row", name=re.compile(f"^{stage}"))).to_contain_text(" s")
    expect(fact(page, "State")).to_have_text("deadline passed", timeout=(DEADLINE_S + 10) * 1000)
    expect(fact(page, "Result")).to_have_text("in time")

    narrow = visit("viewer", f"/workflows/one/?tenant=demo&workflow={story.workflow}", width=390)
    expect(narrow.locator("#workflow-requests tr").first).to_be_visible()
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 390
