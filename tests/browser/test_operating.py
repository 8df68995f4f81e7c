"""Tenants and keys, requests, fleet, scaling and audit as people use them; the walk from a miss to its cause."""

from __future__ import annotations

import json
import re
import time

import pytest
import requests
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def ask(stack, key):
    head = {"Authorization": f"Bearer {key}"}
    body = {"model": stack.credentials["model"], "prompt": "Hello", "max_tokens": 2}
    return requests.post(f"{stack.gateway}/v1/completions", json=body, headers=head, timeout=30).status_code


def within(seconds, holds):
    give_up_at = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def test_a_key_is_made_shown_once_used_rotated_and_revoked(visit, stack):
    page = visit("admin", "/tenants/")
    page.get_by_role("link", name="demo", exact=True).click()
    page.get_by_label("Name of the key").fill("browser key")
    page.get_by_role("button", name="Make the key").click()
    secret = page.locator("[data-secret]").inner_text()
    assert secret.startswith("sk-")
    within(5, lambda: ask(stack, secret) == 200)
    page.get_by_role("link", name="I have it").click()
    assert secret not in page.content()
    row = page.get_by_role("row", name="browser key")
    row.get_by_role("combobox").select_option("0")
    row.get_by_role("button", name="Rotate").click()
    page.get_by_role("dialog").get_by_role("button", name="Rotate").click()
    successor = page.locator("[data-secret]").inner_text()
    assert successor != secret
    within(2, lambda: ask(stack, secret) == 401)
    assert ask(stack, successor) == 200
    page.get_by_role("link", name="I have it").click()
    page.get_by_role("button", name=f"Revoke {successor[:11]}").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep as it is").click()
    assert ask(stack, successor) == 200
    page.get_by_role("button", name=f"Revoke {successor[:11]}").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("status")).to_contain_text("is revoked")
    within(1, lambda: ask(stack, successor) == 401)


def test_the_second_of_two_admins_sees_the_conflict_on_a_tenant(visit, trouble):
    trouble.expected = ("409",)
    first, second = visit("admin", "/tenants/1/change/"), visit("admin", "/tenants/1/change/")
    for page, value in ((first, "Demo one"), (second, "Demo two")):
        page.get_by_label("Title").fill(value)
    first.get_by_role("button", name="Save").click()
    expect(first.get_by_role("status")).to_contain_text("is changed")
    second.get_by_role("button", name="Save").click()
    expect(second.get_by_role("alert")).to_contain_text("Demo one")
    second.get_by_role("button", name="Save mine over it").click()
    expect(second.get_by_role("status")).to_contain_text("is changed")


def test_from_a_missing_class_to_its_cause_in_three_clicks(visit, stack):
    """Overview, its misses, one of them; the third compares it with one that made it."""
    for each in stack.send(4, slo_class="interactive", max_tokens=100, target_ttft=0.001):
        each.result()
    page = visit("operator")
    row = page.locator("[data-classes] tr").filter(has_text="interactive").filter(has_text="demo")
    row.get_by_role("link", name="Misses").click()
    page.wait_for_url("**attained=no**")
    page.locator("#request-rows th a").first.click()
    expect(page.get_by_role("heading", name="Against its deadlines")).to_be_visible()
    expect(page.get_by_role("region", name="Decisions", exact=True)).to_be_visible()
    page.get_by_role("link", name="Compare with one that made it").click()
    expect(page.get_by_role("heading", name="Compare two requests")).to_be_visible()


def test_two_ticked_requests_are_compared(visit):
    page = visit("viewer", "/requests/")
    boxes = page.locator('#request-rows input[name="id"]')
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.get_by_role("button", name="Compare the two that are ticked").click()
    expect(page.locator(".timeline")).to_have_count(2)
    assert page.locator(".timeline .track i").first.evaluate("(bar) => bar.style.left !== ''")


def test_the_audit_is_filtered_and_saved(visit):
    page = visit("viewer", "/audit/")
    page.get_by_label("Kind", exact=False).first.fill("tenant_created")
    page.get_by_role("button", name="Search").click()
    page.wait_for_url("**kind=tenant_created**")
    rows = page.locator("#audit-rows tr")
    expect(rows.first).to_contain_text("tenant_created")
    page.goto(page.url)
    with page.expect_download() as saved:
        page.get_by_role("link", name="Export JSON").click()
    kinds = {row["kind"] for row in json.loads(saved.value.path().read_text())}
    assert kinds == {"tenant_created"}
    with page.expect_download() as saved:
        page.get_by_role("link", name="Export CSV").click()
    assert saved.value.suggested_filename.endswith(".csv")
    assert saved.value.path().read_text().startswith("id,at,actor_type")


def test_an_instance_is_drained_after_a_question_and_that_is_recorded(visit):
    page = visit("operator", "/fleet/")
    cell = page.locator("a.cell[title*=', ready,']").first  # the scaler may have drained any of them by now
    name = cell.locator(".name").inner_text()
    cell.click()
    page.get_by_role("button", name="Drain").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Drain {name}?")
    dialog.get_by_role("button", name="Keep as it is").click()
    expect(page.get_by_role("listitem").filter(has_text="operator drained")).to_have_count(0)
    page.get_by_role("button", name="Drain").click()
    dialog.get_by_role("button", name="Drain").click()
    expect(page.get_by_role("status")).to_contain_text("nothing new is sent there")
    expect(page.get_by_role("button", name="Drain", exact=True)).to_have_count(0)
    expect(page.get_by_role("listitem").filter(has_text=f"operator drained instance {name}")).to_be_visible()


def test_a_role_is_set_after_saying_what_will_happen_and_taken_back(visit):
    page = visit("operator", "/fleet/")
    cell = page.locator("a.cell[title*=', ready,']").first
    name = cell.locator(".name").inner_text()
    cell.click()
    page.get_by_role("link", name="Set role").click()
    expect(page.get_by_role("button", name="Set role prefill")).to_be_disabled()
    expect(page.locator("main")).to_contain_text("Make one decode first")
    expect(page.locator("main")).to_contain_text("nothing comes to it until one does")
    page.get_by_role("button", name="Set role decode").click()
    expect(page.get_by_role("status")).to_contain_text(f"The role of {name} is decode")
    expect(page.locator("h1 + .lead")).to_contain_text("decode of demo")
    page.get_by_role("link", name="Set role").click()
    page.get_by_role("button", name="Set role collocated").click()
    expect(page.locator("h1 + .lead")).to_contain_text("collocated of demo")
    page.goto(f"/audit/?kind=instance_role_set&subject={name}")
    expect(page.locator("#audit-rows tr")).to_have_count(2)


def test_a_viewer_finds_no_way_to_change_an_instance(visit, trouble):
    trouble.expected = ("403",)
    page = visit("viewer", "/fleet/instances/engine-1/")
    for name in ("Drain", "Stop", "Set role", "Put to sleep"):
        expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)
        expect(page.get_by_role("link", name=name, exact=True)).to_have_count(0)
    page.goto("/fleet/instances/engine-1/role/")
    expect(page.locator("body")).to_contain_text("This needs the role operator")


def test_requests_at_once_of_a_tenant_move_with_its_traffic(visit, stack):
    page = visit("viewer", "/tenants/1/")
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    expect(page.locator("[data-used]")).to_have_text(re.compile(r"^\d+$"))
    before = int(page.locator("[data-used]").inner_text())
    reached = "least => Number(document.querySelector('[data-used]').textContent) >= least"
    fallen = "most => Number(document.querySelector('[data-used]').textContent) < most"
    sent = stack.send(60, slo_class="analytics", max_tokens=200)
    page.wait_for_function(reached, arg=before + 40)
    for each in sent:
        each.result()
    page.wait_for_function(fallen, arg=before + 40)


def test_a_scaling_policy_is_changed_and_says_why_it_does_not_scale(visit):
    page = visit("operator", "/scaling/")
    expect(page.locator(".why-now")).to_contain_text("load")
    page.get_by_role("link", name="Change demo/collocated").click()
    page.get_by_label("Scale out above").fill("0.85")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status")).to_contain_text("Saved")
    expect(page.locator(".facts").first).to_contain_text("0.85")


def test_markup_in_every_name_stays_text(visit, stack):
    """A title, a key's name, a search and a request's workflow: shown as they were typed, and nothing runs."""
    evil = '"><img src=x onerror="window.evil=1"><script>window.evil=1</script>'
    page = visit("admin", "/tenants/1/change/")
    page.get_by_label("Title").fill(evil)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("h1 + .lead")).to_contain_text(evil)
    page.get_by_label("Name of the key").fill(evil[:60])
    page.get_by_role("button", name="Make the key").click()
    expect(page.locator("h1")).to_contain_text(evil[:60])
    (sent,) = stack.send(1, prompt=evil, metadata={"workflow_id": evil[:100], "stage": evil[:100]})
    assert sent.result() in (200, 400)
    for path in ("/tenants/", "/tenants/1/", "/audit/", "/", f"/audit/?q={evil}", f"/requests/?tenant={evil}"):
        page.goto(path)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("window.evil") is None
        assert page.locator("img").count() == 0
    page.goto("/tenants/1/change/")
    page.get_by_label("Title").fill("Demo")
    page.get_by_role("button", name="Save").click()


def test_a_dialog_and_every_control_can_be_used_from_the_keyboard(visit):
    page = visit("operator", "/patterns/")
    page.get_by_role("button", name="Ask first").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    expect(dialog.get_by_role("button", name="Keep as it is")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_nothing_moves_while_frames_arrive(visit):
    """Layout shifts that nobody's input caused, over five seconds of live updates."""
    page = visit("viewer")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(1500)
    page.evaluate(
        """() => { window.shift = 0; new PerformanceObserver((list) => {
             for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
           }).observe({ type: "layout-shift" }); }"""
    )
    page.wait_for_timeout(5000)
    assert page.evaluate("window.shift") < 0.1
