"""Every page for every role: opens without trouble, is accessible, fits, and works from the keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from console.templatetags import units

pytestmark = pytest.mark.browser

PAGES = [
    "/", "/queue/", "/requests/", "/requests/compare/", "/classes/", "/mappings/", "/tenants/", "/tenants/1/",
    "/fleet/", "/fleet/instances/engine-1/", "/scaling/", "/experiments/", "/traces/", "/audit/", "/patterns/",
]  # fmt: skip
EDITS = ["/classes/new/", "/classes/1/", "/classes/1/remove/", "/mappings/1/", "/scaling/new/", "/scaling/1/",
    "/fleet/instances/engine-1/role/",
]  # fmt: skip
ADMINS = ["/tenants/new/", "/tenants/1/change/"]
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
SERIOUS = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.filter((each) => ["serious", "critical"].includes(each.impact))
    .map((each) => `${each.id}: ${each.nodes.map((node) => node.target.join(" ")).join(", ")}`);
}"""


def serious_findings(page):
    """axe-core, evaluated by the debugger: the page's own policy lets no foreign script in."""
    page.evaluate(AXE.read_text())
    return page.evaluate(SERIOUS)


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_every_page_opens_without_trouble(visit, role):
    page = visit(role)
    allowed = {"viewer": PAGES, "operator": [*PAGES, *EDITS], "admin": [*PAGES, *EDITS, *ADMINS]}
    for path in allowed[role]:
        page.goto(path)
        expect(page.locator("h1")).to_be_visible()
        page.wait_for_load_state("networkidle")


@pytest.mark.parametrize("path", ["/api/docs", "/admin/", "/admin/controller/decision/"])
def test_what_lies_beside_the_console_keeps_to_the_same_policy(visit, path):
    page = visit("admin")
    page.goto(path)
    page.wait_for_load_state("networkidle")
    expect(page.locator("body")).not_to_be_empty()


def test_script_and_server_write_numbers_alike(visit):
    page = visit("viewer")
    values = [None, 0.0005, 0.25, 0.9996, 1.5, 12.34, 300, -0.25]
    said = page.evaluate(
        "async (values) => { const f = await import('/static/js/format.js'); return values.map((v) => f.ms(v)); }",
        values,
    )
    assert said == [units.ms(value) for value in values]
    shares = [None, 1, 0.9512, 0]
    said = page.evaluate(
        "async (v) => { const f = await import('/static/js/format.js'); return v.map((each) => f.percent(each)); }",
        shares,
    )
    assert said == [units.percent(share) for share in shares]


@pytest.mark.parametrize(("role", "scheme"), [("admin", "light"), ("admin", "dark"), ("viewer", "light")])
def test_no_page_has_a_serious_finding_of_axe(visit, role, scheme):
    page = visit(role, scheme=scheme)
    found = {}
    for path in PAGES if role == "viewer" else [*PAGES, *EDITS, *ADMINS]:
        page.goto(path)
        page.wait_for_load_state("networkidle")
        found[path] = serious_findings(page)
    assert {path: findings for path, findings in found.items() if findings} == {}


def test_the_login_has_no_serious_finding_of_axe(visit):
    assert serious_findings(visit(None, "/login/")) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_scrolls_sideways(visit, width):
    page = visit("admin", width=width)
    too_wide = {}
    for path in [*PAGES, *EDITS, *ADMINS]:
        page.goto(path)
        page.wait_for_load_state("networkidle")
        taken = page.evaluate("document.documentElement.scrollWidth")
        if taken > width:
            too_wide[path] = taken
    assert too_wide == {}


def test_the_keyboard_reaches_the_content_and_the_focus_is_seen(visit):
    page = visit("operator", "/classes/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    new_class = page.get_by_role("link", name="New class")
    expect(new_class).to_be_focused()
    assert new_class.evaluate("(element) => getComputedStyle(element).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_label("Name", exact=True)).to_be_visible()


def test_anonymous_people_see_the_login_only(visit):
    page = visit(None, "/")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_wrong_password_is_said(visit):
    page = visit(None, "/login/")
    page.get_by_label("User name").fill("operator")
    page.get_by_label("Password").fill("not this one")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("do not match")


def test_signing_out_ends_the_session(visit):
    page = visit("viewer")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.goto("/queue/")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
