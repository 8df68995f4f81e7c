"""Experiments in the browser: asked, watched, compared, saved; previews beside the forms; by role."""

from __future__ import annotations

import os
import re
import signal

import pytest
from playwright.sync_api import expect

from tests.browser.every_page.looks import settle
from tests.browser.every_page.reached import SIMULATED_MS
from tests.browser.running.caller import within

pytestmark = [pytest.mark.browser, pytest.mark.long(175)]

DONE_S = 120_000


@pytest.fixture(scope="module")
def traffic(stack, caller):
    """Some requests on record, of a class and of mapped priorities."""
    sent = stack.send(12, slo_class="interactive", max_tokens=20) + stack.send(12, priority=1, max_tokens=20)
    assert [each.result() for each in sent].count(200) >= 20
    last = stack.ask({"model": stack.credentials["model"], "prompt": "The last one.", "max_tokens": 1})
    query = {"id": last.headers["x-slackline-request-id"]}
    within(20, lambda: caller.get("requests", **query)["items"])  # they are recorded in the order of their ends


def start(page, **fields):
    """A short mix on a shipped profile, two policies."""
    page.goto("/experiments/new/")
    page.locator("#id_kind").select_option("mix")
    page.locator("#id_rate").fill(fields.pop("rate", "20"))
    page.locator("#id_duration_s").fill(fields.pop("duration", "10"))
    page.locator("#id_fleet").select_option("profile")
    page.locator("#id_contenders-1-policy").select_option("round_robin")
    for label, value in fields.items():
        page.locator(f"#id_{label}").fill(value)
    expect(page.locator("[data-estimate]")).to_contain_text("requests")
    page.get_by_role("button", name="Start experiment").click()
    page.wait_for_url(re.compile(r"/experiments/(?!new).+/$"))


def test_yesterday_or_the_last_hour_with_one_instance_less_in_two_clicks(visit, traffic):
    page = visit("operator")
    page.get_by_role("link", name="Experiments").click()
    expect(page.get_by_role("button", name="Yesterday (UTC) with one fewer instance")).to_be_visible()
    page.get_by_role("button", name="The last hour with one fewer instance").click()
    expect(page.get_by_role("heading", name="The last hour with 1 fewer instance")).to_be_visible()
    expect(page.locator('[data-chart="ttft"] .main-svg').first).to_be_visible(timeout=DONE_S)
    expect(page.locator(".legend")).to_contain_text("unchanged")
    rows = page.get_by_role("region", name="Results").locator("tbody tr")
    expect(rows).to_have_count(2)


def test_the_form_shows_what_it_needs_and_says_what_is_wrong(visit):
    page = visit("operator", "/experiments/new/")
    expect(page.get_by_label("From (UTC)")).to_be_visible()
    expect(page.locator("#id_rate")).to_be_hidden()
    page.get_by_role("button", name="yesterday (UTC)").click()
    assert (
        page.get_by_label("From (UTC)").input_value().endswith("T00:00:00")
        or "T00:00" in page.get_by_label("From (UTC)").input_value()
    )
    page.locator("#id_kind").select_option("mix")
    expect(page.get_by_label("From (UTC)")).to_be_hidden()
    rate = page.locator("#id_rate")
    rate.fill("-3")
    expect(rate).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#id_rate_error")).to_contain_text("greater than or equal")
    rate.fill("12")
    expect(page.locator("#id_rate_error")).to_have_count(0)
    expect(page.get_by_label("Mean prompt")).to_be_hidden()
    page.locator("#id_mix").select_option("own")
    expect(page.get_by_label("Mean prompt")).to_be_visible()


def test_progress_moves_and_the_result_is_drawn_and_saved(visit):
    page = visit("operator", "/experiments/")
    start(page, rate="60", duration="30", rates="30, 60", name="Two rates")
    expect(page.get_by_role("heading", name="Progress")).to_be_visible()
    expect(page.get_by_role("progressbar")).to_be_visible()
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    expect(page.locator('[data-cell="percent"]')).not_to_have_text("0 %", timeout=60_000)
    expect(page.locator('[data-chart="attainment_rates"] .main-svg').first).to_be_visible(timeout=DONE_S)
    for name in ("attainment", "goodput", "ttft", "tpot", "cost", "queue", "goodput_rates"):
        expect(page.locator(f'[data-chart="{name}"] .main-svg').first).to_be_visible()
    expect(page.locator('[data-chart="attainment"]')).to_contain_text("SLO 9")
    page.get_by_label("Latency of").select_option("wikisql")
    expect(page.locator('[data-chart="ttft"]')).to_contain_text("SLO 20 s")
    page.locator("#chart-rate").select_option("1")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save Time to first token as PNG").click()
    assert download.value.suggested_filename.endswith("-ttft.png")
    assert download.value.path().read_bytes()[:4] == b"\x89PNG"
    for form in ("CSV", "JSON"):
        with page.expect_download() as download:
            page.get_by_role("link", name=form).click()
        assert download.value.suggested_filename.endswith(f".{form.lower()}")
    page.locator("#experiment-name").fill("Kept by its name")
    page.get_by_label(re.compile("Keep")).check()
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("heading", name="Kept by its name")).to_be_visible()
    address = page.url
    other = visit("viewer", address)
    expect(other.get_by_role("heading", name="Kept by its name")).to_be_visible()
    expect(other.get_by_role("button", name="Remove")).to_have_count(0)
    expect(other.locator('[data-chart="cost"] .main-svg').first).to_be_visible()


def test_one_that_runs_is_cancelled_and_removed(visit):
    page = visit("operator", "/experiments/")
    start(page, rate="100", duration="900", name="Too long")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator('.lead [data-cell="state"]')).to_have_text("cancelled")
    page.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_role("status").first).to_contain_text("Too long removed")
    page.goto("/audit/?kind=experiment_cancelled")
    expect(page.locator("#audit-rows tr").first).to_contain_text("operator")


@pytest.mark.thorough
def test_the_list_follows_what_runs(visit):
    page = visit("operator", "/experiments/")
    start(page, rate="60", duration="120", name="Watched from the list")
    watcher = visit("viewer", "/experiments/")
    row = watcher.get_by_role("row", name="Watched from the list")
    expect(row.locator('[data-cell="state"]')).to_have_text("done", timeout=DONE_S)
    watcher.locator("#experiment-state").select_option("failed")
    watcher.get_by_role("button", name="Search").click()
    expect(watcher.get_by_text("No matching experiments")).to_be_visible()


def test_a_trace_is_handed_in_after_what_was_wrong_with_it_is_said_and_removed(visit, trouble):
    trouble.expected = ("422",)
    page = visit("operator", "/traces/")
    page.get_by_label("Name").fill("browser trace")
    bad = {"name": "t.csv", "mimeType": "text/csv", "buffer": b"input_tokens,output_tokens\n10,many\n"}
    page.get_by_label("File").set_input_files(bad)
    page.get_by_role("button", name="Upload trace").click()
    expect(page.locator("#id_file_error")).to_contain_text("line 2, output_tokens: 'many' is not a number")
    page.get_by_label("File").set_input_files({**bad, "buffer": b"input_tokens,output_tokens\n10,5\n20,6\n"})
    page.get_by_role("button", name="Upload trace").click()
    row = page.get_by_role("row", name="browser trace")
    expect(row).to_contain_text("2")
    page.get_by_role("button", name="Remove browser trace").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Remove browser trace?")
    dialog.get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_role("status").filter(has_text="Trace removed")).to_be_visible()
    expect(row).to_have_count(0)


def test_an_edit_of_a_class_is_previewed_before_it_is_saved(visit, traffic):
    page = visit("operator", "/classes/")
    page.get_by_role("link", name="Edit interactive").click()
    judged = page.locator("[data-judged]")
    expect(judged).to_contain_text("would be attained")
    field = page.get_by_label("TTFT")
    stored = field.input_value()
    field.fill("0")
    expect(field).to_have_attribute("aria-invalid", "true")
    field.fill("0.0002")
    expect(judged).to_contain_text("no longer attained")
    page.get_by_role("button", name="Run simulation").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    table = page.get_by_role("region", name="Simulation result")
    expect(table).to_be_visible(timeout=SIMULATED_MS)
    worse = table.get_by_role("row", name="interactive").locator(".miss")
    expect(worse).to_have_text(re.compile(r"^\d{1,2}(\.\d)? %$"))
    page.reload()
    expect(page.get_by_label("TTFT")).to_have_value(stored)


def test_an_edit_of_the_mapping_is_previewed_and_undone(visit, traffic):
    page = visit("operator", "/mappings/1/")
    expect(page.locator("[data-judged]")).to_contain_text("would be attained")
    widest = page.get_by_label("Maximum TTFT").last
    stored = widest.input_value()
    widest.fill("99")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("status").first).to_contain_text("updated")
    page.goto("/mappings/1/history/")
    expect(page.locator("ins").first).to_contain_text("99")
    page.get_by_role("link", name=re.compile("^Revert")).first.click()
    expect(page.get_by_label("Maximum TTFT").last).to_have_value(stored)
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("status").first).to_contain_text("updated")


@pytest.mark.thorough
def test_redis_hanging_is_said_and_the_experiment_goes_on(visit, stack):
    page = visit("operator", "/experiments/")
    start(page, rate="60", duration="100", name="Through an outage")
    state = page.locator("[data-live-state]")
    expect(state).to_have_attribute("data-state", "live")
    redis = stack.pid("redis")
    os.kill(redis, signal.SIGSTOP)
    try:
        expect(state).to_have_attribute("data-state", "stale", timeout=15_000)
    finally:
        os.kill(redis, signal.SIGCONT)
    expect(page.locator('[data-chart="ttft"] .main-svg').first).to_be_visible(timeout=DONE_S)


@pytest.mark.thorough
def test_a_killed_worker_is_followed_by_another_one_that_goes_on(visit, stack):
    page = visit("operator", "/experiments/")
    start(page, rate="60", duration="120", name="Killed in the middle")
    expect(page.locator('[data-cell="percent"]')).not_to_have_text("0 %", timeout=60_000)
    os.kill(stack.pid("analysis"), signal.SIGKILL)
    expect(page.locator('[data-chart="ttft"] .main-svg').first).to_be_visible(timeout=2 * DONE_S)


def test_what_the_server_found_wrong_stays_until_it_is_touched(visit, trouble):
    trouble.expected = ("422",)
    page = visit("operator", "/classes/")
    page.get_by_role("link", name="Edit interactive").click()
    page.get_by_label("TTFT").fill("0")
    page.get_by_role("button", name="Save").click()
    settle(page)
    expect(page.locator("#id_ttft_s_error")).to_be_visible()
    with page.expect_response(lambda answer: answer.request.method == "POST"):  # the form is validated
        page.get_by_label("Title").fill("Something else")
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    expect(page.locator("#id_ttft_s_error")).to_be_visible()
    page.get_by_label("TTFT").fill("0.7")
    expect(page.locator("#id_ttft_s_error")).to_have_count(0)
