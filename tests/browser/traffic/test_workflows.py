"""Two requests of a workflow share a deadline: the page of workflows, and what a request's own page says of it."""

from __future__ import annotations

import re
import secrets

import pytest
from playwright.sync_api import expect

from tests.browser.running.caller import within

pytestmark = pytest.mark.browser


def test_two_requests_of_a_workflow_share_its_deadline(visit, stack):
    name = f"report-{secrets.token_hex(4)}"
    for stage, more in (("plan", {"workflow_deadline": 120, "workflow_steps_left": 2}), ("write", {})):
        body = {"model": "demo", "prompt": "Say something.", "max_tokens": 4, **more}
        stack.ask({**body, "metadata": {"workflow_id": name, "stage": stage}}).raise_for_status()
    page = visit("viewer", "/requests/")
    page.get_by_role("link", name="Workflows", exact=True).click()
    expect(page.get_by_role("heading", name="Workflows", level=1)).to_be_visible()
    row = page.get_by_role("row", name=re.compile(name))
    for _ in range(20):  # records are stored within a second
        if row.count() and "plan, write" in row.inner_text():
            break
        page.wait_for_timeout(250)
        page.reload()
    expect(row).to_contain_text("in time so far")
    expect(row).to_contain_text("plan, write")
    row.get_by_role("link", name=name).click()
    expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()
    expect(page.locator("#workflow-requests tr")).to_have_count(2)
    expect(page.locator("#workflow-requests tr").first).to_contain_text("plan")
    expect(page.get_by_role("button", name="Cancel workflow")).to_have_count(0)  # a viewer only reads
    drawn = page.get_by_role("group", name=re.compile("^Requests of the workflow"))
    expect(drawn.get_by_role("link")).to_have_count(2)
    drawn.get_by_role("link", name=re.compile("^1 plan: ")).focus()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text("Deadline of its workflow")
    page.go_back()
    page.locator("#workflow-requests tr").last.get_by_role("link").first.click()
    expect(page.locator("main")).to_contain_text("Deadline of its workflow")
    expect(page.locator("main")).to_contain_text("its share of the time left in the workflow")


def test_an_operator_cancels_an_open_workflow(visit, stack):
    name = f"report-{secrets.token_hex(4)}"
    body = {"model": "demo", "prompt": "Say something.", "max_tokens": 4, "workflow_deadline": 600}
    stack.ask({**body, "metadata": {"workflow_id": name}}).raise_for_status()
    page = visit("operator", f"/workflows/one/?tenant=demo&workflow={name}")
    page.get_by_role("button", name="Cancel workflow").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Cancel workflow {name}?")
    dialog.get_by_role("button", name="Cancel workflow").click()
    expect(page.get_by_text(f"{name} cancelled. Its requests end within a second.")).to_be_visible()
    expect(page.locator("main")).to_contain_text("by an operator")
    expect(page.get_by_role("button", name="Cancel workflow")).to_have_count(0)
    decisions = page.get_by_role("region", name="Decisions about this workflow").or_(page.locator("ol.lines"))
    expect(decisions.first).to_contain_text(f"cancelled workflow {name}")
    refused = stack.ask({**body, "metadata": {"workflow_id": name}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (499, "cancelled")
    row = page.get_by_role("row", name=re.compile(name))

    def listed() -> bool:
        """Once the record of its request is stored, which takes a second or two."""
        page.goto("/workflows/?state=cancelled")
        return row.count() == 1

    within(15, listed)
    expect(row).to_contain_text("by an operator")
