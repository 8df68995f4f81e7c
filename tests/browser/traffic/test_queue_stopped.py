"""Commands that do not come to their end: stopped by a person, or without an answer because Redis hung in the middle.

What the page then says is held against what the gateway did, which tells how many requests each command was applied to.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.running.caller import within
from tests.browser.running.stack import ROOT, Stack

pytestmark = [pytest.mark.browser, pytest.mark.long(65)]

ROW = "[data-rows] tr:not(.space)"
STOP_AT = 500
SAID_S = 20.0
STOPPED = re.compile(r"Stopped\. (\d+) cancelled(?:, (\d+) no longer in the queue)?\. (\d+) unchanged\.")
LOST = re.compile(
    r"(\d+) cancelled(?:, (\d+) no longer in the queue)?\. No answer for (\d+) requests?, which may have been "
    r"cancelled, or may be within 5 seconds\. Redis is unavailable: (\d+) unchanged\."
)


@pytest.fixture
def gateway(stack: Stack) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`gateway(400, "--still", "--answer-after", "0.1")`: one with so many waiting requests that obeys commands."""
    ports = json.loads((stack.folder / "ports.json").read_text())
    started: list[subprocess.Popen[str]] = []

    def start(rows: int, *options: str) -> subprocess.Popen[str]:
        redis = f"redis://127.0.0.1:{ports['redis']}/0"
        command = [sys.executable, "-m", "tests.browser.running.crowd", redis, str(rows), *options]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "crowded\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def redis(stack: Stack) -> Iterator[int]:
    """Its process, which goes on at the end whatever has stopped it."""
    pid = stack.pid("redis")
    yield pid
    os.kill(pid, signal.SIGCONT)


def applied_by(process: subprocess.Popen[str]) -> list[int]:
    """By command, to how many requests that gateway applied it. Ends the gateway."""
    process.kill()
    assert process.stdout is not None
    return [int(line) for line in process.stdout]


def open_crowd(visit):
    page = visit("operator", "/queue/?text=tenant:crowd")
    expect(page.locator(ROW).filter(has_text="crowd").first).to_be_visible()
    return page


def cancel_all(page):
    page.get_by_role("button", name=re.compile("^Select all .* matching$")).click()
    page.get_by_role("button", name="Cancel requests", exact=True).click()
    page.get_by_role("dialog").locator("[data-confirm-yes]").click()


def said(page, pattern):
    """The figures in what the page says at the end."""
    answer = page.locator("[data-answer]")
    expect(answer).to_have_text(pattern)
    found = pattern.fullmatch(answer.inner_text())
    assert found is not None
    return [int(each or 0) for each in found.groups()]


@pytest.mark.thorough
def test_a_long_command_is_stopped_in_the_middle_and_what_is_said_of_it_is_true(visit, gateway, caller):
    process = gateway(4000, "--answer-after", "0.75")  # 12 s in all: time to stop it on a busy machine
    page = open_crowd(visit)
    cancel_all(page)
    page.wait_for_function(
        "least => parseInt(document.querySelector('[data-progress-text]').textContent.replaceAll(',', '')) >= least",
        arg=STOP_AT,
    )
    page.get_by_role("button", name="Stop").click()
    cancelled, gone, left = said(page, STOPPED)
    assert cancelled >= STOP_AT / 2
    assert left > 0
    expect(page.locator("[data-progress]")).to_be_hidden()
    outcome = caller.recorded("queue_cancel")[0]["outcome"]
    assert (outcome["ended"], outcome["unanswered"]) == ("stopped", 0)
    assert (outcome["applied"], outcome["gone"], outcome["of"] - outcome["told"]) == (cancelled, gone, left)
    assert sum(applied_by(process)) == cancelled
    page.goto("/audit/?kind=queue_cancel")
    expect(page.locator("#audit-rows tr").first).to_contain_text(f"cancelled {cancelled} of {outcome['of']} requests")


def test_a_command_on_all_whose_answer_is_lost_says_what_is_not_known(visit, gateway, redis, caller):
    process = gateway(2000, "--answer-after", "0.1", "--hang", str(redis), "--at", "3")
    page = open_crowd(visit)
    cancel_all(page)
    cancelled, gone, unknown, left = said(page, LOST)
    os.kill(redis, signal.SIGCONT)
    done = applied_by(process)
    assert len(done) == 3
    assert sum(done[:2]) == cancelled  # of the third it is not claimed that it was done, nor that it was not
    assert 0 < done[2] <= unknown
    assert left > 0
    outcome = caller.recorded("queue_cancel")[0]["outcome"]
    assert (outcome["ended"], outcome["unanswered"], outcome["of"] - outcome["told"]) == ("redis_away", unknown, left)
    assert (outcome["applied"], outcome["gone"]) == (cancelled, gone)


def test_a_command_on_one_request_whose_answer_is_lost_is_not_called_undone(visit, gateway, redis, caller, trouble):
    trouble.expected = ("503",)
    process = gateway(400, "--still", "--answer-after", "0.1", "--hang", str(redis), "--at", "1")
    page = open_crowd(visit)
    page.locator(ROW).nth(5).get_by_role("checkbox").check()
    chosen = page.locator(f"{ROW} input:checked").get_attribute("value")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator("[data-answer]")).to_have_text(
        "Redis became unavailable before the answer. No answer for 1 request, which may have been paused, "
        "or may be within 5 seconds. Check the queue for the current state."
    )
    os.kill(redis, signal.SIGCONT)
    assert page.locator("[data-selected]").inner_text() == "1 selected"
    page.get_by_label("Filter by tenant").fill(f"id:{chosen}")
    row = page.locator(ROW).filter(has_text=chosen)
    expect(row.locator('[data-cell="paused"]')).to_be_visible()  # so it was done, and the queue shows it
    decision = caller.recorded("queue_pause", request_id=chosen)[0]  # ids of a crowd come again
    assert (decision["outcome"]["unanswered"], decision["outcome"]["gone"]) == ([chosen], [])
    assert "Redis became unavailable" in decision["outcome"]["error"]
    assert applied_by(process) == [1]


def test_with_redis_hanging_before_anything_is_told_nothing_was_done(visit, gateway, redis, caller, trouble):
    trouble.expected = ("503",)
    process = gateway(400, "--still", "--answer-after", "0.1")
    page = open_crowd(visit)
    page.locator(ROW).nth(5).get_by_role("checkbox").check()
    os.kill(redis, signal.SIGSTOP)
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator("[data-answer]")).to_have_text(
        "Redis is unavailable, so no gateway can be reached. No requests were paused."
    )
    os.kill(redis, signal.SIGCONT)
    within(SAID_S, lambda: "error" in caller.recorded("queue_pause")[0]["outcome"])
    assert applied_by(process) == []


def test_a_proxy_that_answers_for_the_console_does_not_make_a_command_undone(visit, gateway, trouble):
    """The command is told, and its answer replaced on the way back: on one request, and on all that match."""
    trouble.expected = ("502",)
    process = gateway(401, "--still", "--answer-after", "0.1")  # one of them runs
    page = open_crowd(visit)

    def replace(route):
        route.fetch()
        route.fulfill(status=502, content_type="text/html", body="Bad gateway")

    page.route(
        "**/queue/command/**", lambda route: replace(route) if route.request.method == "POST" else route.fallback()
    )
    page.locator(ROW).nth(5).get_by_role("checkbox").check()
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator("[data-answer]")).to_contain_text("The command may have taken effect")
    cancel_all(page)
    expect(page.locator("[data-answer]")).to_contain_text("400 cancelled")  # as its record says
    assert applied_by(process) == [1, 250, 150]
