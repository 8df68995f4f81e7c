"""Tenants and their keys through the pages; each change is tried at the gateway."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import expect

from tests.browser.running.caller import Caller, busy, within

pytestmark = [pytest.mark.browser, pytest.mark.long(60)]


def ask(stack, key):
    body = {"model": stack.credentials["model"], "prompt": "Hello", "max_tokens": 2, "slo_class": "analytics"}
    return stack.ask(body, key=key).status_code


def new_key(page, name):
    """Makes a key on the tenant's page; what is shown once."""
    page.get_by_label("Key name").fill(name)
    page.get_by_role("button", name="Create key").click()
    secret = page.locator("[data-secret]").inner_text()
    assert secret.startswith("sk-")
    page.get_by_role("link", name="Done").click()
    expect(page.get_by_role("row", name=name)).to_be_visible()
    assert secret not in page.content()
    return secret


def set_state(page, state):
    page.get_by_role("main").get_by_role("link", name="Edit", exact=True).click()
    page.get_by_label("State").select_option(state)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status").filter(has_text="updated")).to_be_visible()


def test_a_tenant_is_made_served_suspended_and_let_in_again(visit, stack):
    page = visit("admin", "/tenants/")
    page.get_by_role("link", name="New tenant").click()
    page.get_by_label("Name", exact=False).first.fill("browser-tenant")
    page.get_by_label("Requests per minute").fill("600")
    page.get_by_role("button", name="Create tenant").click()
    expect(page.get_by_role("status").filter(has_text="browser-tenant created")).to_be_visible()
    secret = new_key(page, "its first key")
    within(5, lambda: ask(stack, secret) == 200)
    set_state(page, "suspended")
    within(2, lambda: ask(stack, secret) in (401, 403))
    set_state(page, "active")
    within(2, lambda: ask(stack, secret) == 200)
    page.goto("/tenants/")
    expect(page.get_by_role("row", name="browser-tenant")).to_contain_text("Active")


def test_a_tenant_of_that_name_is_there_already(visit, trouble):
    trouble.expected = ("422",)
    page = visit("admin", "/tenants/new/")
    page.get_by_label("Name", exact=False).first.fill("acme")
    page.get_by_label("Title").fill("Kept what I typed")
    page.get_by_role("button", name="Create tenant").click()
    expect(page.get_by_role("alert").first).to_contain_text("Not saved")
    expect(page.get_by_label("Title")).to_have_value("Kept what I typed")


def test_a_key_is_made_shown_once_used_rotated_and_revoked(visit, stack):
    page = visit("admin", "/tenants/")
    page.get_by_role("link", name="demo", exact=True).click()
    secret = new_key(page, "browser key")
    within(5, lambda: ask(stack, secret) == 200)
    row = page.get_by_role("row", name="browser key")
    row.get_by_role("combobox").select_option("0")
    row.get_by_role("button", name="Rotate").click()
    page.get_by_role("dialog").get_by_role("button", name="Rotate").click()
    successor = page.locator("[data-secret]").inner_text()
    assert successor != secret
    within(2, lambda: ask(stack, secret) == 401)
    assert ask(stack, successor) == 200
    page.get_by_role("link", name="Done").click()
    page.get_by_role("button", name=f"Revoke {successor[:11]}").click()
    page.get_by_role("dialog").get_by_role("button", name="Go back").click()
    assert ask(stack, successor) == 200
    page.get_by_role("button", name=f"Revoke {successor[:11]}").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("status")).to_contain_text("revoked")
    within(1, lambda: ask(stack, successor) == 401)


def make_key(page, name):
    """Until the key is shown; its text."""
    page.get_by_label("Key name").fill(name)
    page.get_by_role("button", name="Create key").click()
    return page.locator("[data-secret]").inner_text()


def test_a_new_key_is_copied_with_its_button(visit, stack):
    page = visit("admin", "/tenants/1/")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=stack.console)
    secret = make_key(page, "copied key")
    page.evaluate("navigator.clipboard.writeText('what was there before')")
    page.get_by_role("button", name="Copy").click()
    expect(page.locator("[data-copied]")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == secret
    within(5, lambda: ask(stack, secret) == 200)


def test_where_the_browser_forbids_copying_the_key_is_selected_for_it(visit, stack):
    page = visit("admin", "/tenants/1/")
    page.context.grant_permissions(["geolocation"], origin=stack.console)  # which denies all others
    secret = make_key(page, "forbidden key")
    page.get_by_role("button", name="Copy").click()
    expect(page.locator("[data-copied]")).to_contain_text("Select the text and copy it manually")
    assert page.evaluate("getSelection().toString()") == secret


def test_without_a_clipboard_the_key_is_there_to_be_selected(visit):
    """As over plain HTTP from another machine, where browsers have no clipboard for pages."""
    page = visit("admin", "/tenants/1/")
    page.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', { get: () => undefined })")
    secret = make_key(page, "key by hand")
    assert page.evaluate("navigator.clipboard === undefined")
    expect(page.locator("[data-secret]")).to_be_visible()
    expect(page.locator("[data-copy]")).to_be_hidden()
    page.locator("[data-secret]").click(click_count=3)
    assert page.evaluate("getSelection().toString()").strip() == secret


def test_requests_at_once_of_a_tenant_move_with_its_traffic(visit, stack, lane):
    page = visit("viewer", "/tenants/1/")
    expect(page.locator("[data-live-state]")).to_have_attribute("data-state", "live")
    expect(page.locator("[data-used]")).to_have_text(re.compile(r"^\d+$"))
    before = int(page.locator("[data-used]").inner_text())
    reached = "least => Number(document.querySelector('[data-used]').textContent) >= least"
    fallen = "most => Number(document.querySelector('[data-used]').textContent) < most"
    with busy(stack, lane):  # they wait as long as the page takes
        sent = stack.send(60, model=lane, slo_class="batch", max_tokens=2)
        page.wait_for_function(reached, arg=before + 40)
    for each in sent:
        each.result()
    page.wait_for_function(fallen, arg=before + 40)


def test_refusals_of_a_tenant_that_hammers_are_one_row_that_says_so(visit, stack):
    admin = Caller(stack, "admin")
    admin.post("tenants", {"name": "hammering", "rpm": 1})
    made = admin.post("api-keys", {"tenant": "hammering", "name": "hammer"})
    within(10, lambda: ask(stack, made["secret"]) in (200, 429))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: ask(stack, made["secret"]), range(160)))
    page = visit("viewer", "/requests/?tenant=hammering")
    several = page.locator("#request-rows tr").filter(
        has=page.locator(".badge", has_text=re.compile(r"^\d+ requests$"))
    )
    for _ in range(20):
        if several.count():
            break
        page.wait_for_timeout(500)
        page.reload()
    several.first.get_by_role("link").click()
    expect(page.locator("[data-stands-for]")).to_contain_text("requests of hammering that were refused")
