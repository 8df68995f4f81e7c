"""An admin writes a launch template, reads its command before saving, and removes it; an operator sees it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_an_admin_writes_a_template_and_reads_its_command_first(visit, trouble):
    trouble.expected = ("422",)
    page = visit("admin", "/fleet/")
    page.get_by_role("link", name="Launch templates").click()
    page.get_by_role("link", name="New template").click()
    page.get_by_label("Name", exact=True).fill("tiny-vllm")
    page.get_by_label("Backend").select_option("vllm")
    page.get_by_role("textbox", name="Command").fill("vllm\nserve\n${model}")
    page.get_by_role("button", name="Show command").click()
    expect(page.get_by_text("Must contain ${port}")).to_be_visible()
    page.get_by_role("textbox", name="Command").fill("vllm\nserve\n${model}\n--port\n${port}")
    page.get_by_role("button", name="Show command").click()
    shown = page.get_by_role("region", name="Command with example values")
    expect(shown).to_contain_text("vllm serve /models/example --port 8100")
    page.get_by_role("button", name="Create template").click()
    expect(page.get_by_role("status")).to_contain_text("Launch template tiny-vllm created.")

    operator = visit("operator", "/launch-templates/")
    row = operator.get_by_role("row", name=re.compile("^tiny-vllm"))
    row.locator("summary").click()
    expect(row.locator("pre").first).to_have_text("vllm serve /models/example --port 8100")
    operator.goto("/fleet/start/")
    expect(operator.get_by_label("Template").locator("option", has_text="tiny-vllm")).to_have_count(1)

    page.get_by_role("link", name="Edit tiny-vllm").click()
    expect(page.get_by_role("textbox", name="Command")).to_have_value("vllm\nserve\n${model}\n--port\n${port}")
    page.get_by_label("Start limit").fill("90")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("row", name=re.compile("^tiny-vllm"))).to_contain_text("90")
    page.get_by_role("link", name="Remove tiny-vllm").click()
    page.get_by_role("button", name="Remove tiny-vllm").click()
    expect(page.get_by_role("status")).to_contain_text("Launch template tiny-vllm removed.")
