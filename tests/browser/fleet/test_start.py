"""An engine is started from a launch template in the console, followed on its page, and serves."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.every_page.looks import beyond, serious_findings
from tests.browser.running.caller import within

pytestmark = pytest.mark.browser

MODEL, NAME = "started", "started-by-hand"
SERVES_S = 120.0


def test_an_instance_is_started_from_a_template_and_serves(visit, stack, caller):
    caller.post("models", {"name": MODEL, "context_tokens": 4096})
    page = visit("operator", "/fleet/")
    page.get_by_role("link", name="Start instance").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Start an instance")
    page.get_by_text(re.compile("^vllm: vllm, collocated")).click()
    expect(page.get_by_text("vllm serve /models/example").filter(visible=True)).to_have_count(1)
    assert beyond(page, 1280) == 0
    assert serious_findings(page) == []

    page.get_by_label("Template", exact=True).select_option(label="reference")
    page.get_by_label("Model", exact=True).select_option(label=MODEL)
    page.get_by_label(re.compile("^Name")).fill(NAME)
    page.get_by_role("button", name="Start instance", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Start this instance?")
    dialog.get_by_role("button", name="Start instance").click()

    expect(page).to_have_url(re.compile(f"/fleet/instances/{NAME}/$"))
    expect(page.get_by_role("status").filter(has_text=f"{NAME} is being started.")).to_be_visible()
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
    within(SERVES_S, lambda: stack.ask(body).status_code == 200)
    start = page.get_by_role("region", name="Engine startup")
    expect(start).to_contain_text("Process started")
    expect(start).to_contain_text("Health check passed")
    (made,) = caller.recorded("instance_created", subject=NAME, actor="operator")
    assert made["inputs"]["after"]["provisioner"] == "process"
    caller.post(f"instances/{NAME}/stop", {})


def test_a_viewer_sees_no_way_to_start(visit, trouble):
    trouble.expected = ("403",)
    page = visit("viewer", "/fleet/")
    expect(page.get_by_role("link", name="Start instance")).to_have_count(0)
    page.goto("/fleet/start/")
    expect(page.get_by_role("heading", name="Start an instance")).to_have_count(0)
