"""Every page for every role: opens without trouble, shows who may act the controls, is accessible, and fits."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from console.templatetags import units
from tests.browser.every_page.looks import beyond, findings_in_both_schemes, serious_findings, settle
from tests.browser.every_page.pages import ACTIONS, PAGES, RANK
from tests.browser.every_page.reached import REACHED

pytestmark = [pytest.mark.browser, pytest.mark.long(365)]

WIDE, NARROW = 1280, 390
LOOKS = [(WIDE, "light"), (NARROW, "dark")]
PASSES = [("viewer", WIDE, "light"), ("operator", WIDE, "light"), *(("admin", *look) for look in LOOKS)]


def well_made(page, width, scheme):
    """With each of the two widths in both schemes, so in all four looks."""
    settle(page)
    assert findings_in_both_schemes(page, scheme) == []
    assert beyond(page, width) == 0


def controls_shown(page, name, role):
    """Those that `role` may use are there and the others are not."""
    for action in ACTIONS:
        if action.page == name and action.control:
            kind, text = action.control
            control = page.get_by_role("main").get_by_role(kind, name=text, exact=isinstance(text, str))
            if RANK[role] >= RANK[action.role]:
                expect(control.first, f"{role} misses {text}").to_be_visible()
            else:
                expect(control, f"{role} finds {text}").to_have_count(0)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("listed", PAGES, ids=lambda listed: listed.name)
@pytest.mark.parametrize(("role", "width", "scheme"), PASSES)
def test_a_page_opens_shows_its_controls_is_accessible_and_fits(tab, places, trouble, role, width, scheme, listed):
    page = tab(role, width, scheme)
    if not listed.open_to(role):
        trouble.expected = ("403",)
        page.goto(listed.at(places))
        expect(page.get_by_role("heading", name="Access denied")).to_be_visible()
        expect(page.get_by_text(f"This requires the {listed.role} role. Your role is {role}.")).to_be_visible()
        return
    if listed.status != 200:
        trouble.expected = (str(listed.status),)
    page.goto(listed.at(places))
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    controls_shown(page, listed.name, role)
    if role == "admin":  # who sees all of it
        well_made(page, width, scheme)
    elif role == "viewer":  # who sees the least, in the same colours
        settle(page)
        assert serious_findings(page) == []
        assert beyond(page, width) == 0


@pytest.mark.sampled(6)
@pytest.mark.parametrize("reached", REACHED, ids=lambda reached: reached.name)
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_page_that_one_comes_to_by_doing_is_accessible_and_fits(tab, places, trouble, width, scheme, reached):
    if reached.status != 200:
        trouble.expected = (str(reached.status),)
    page = tab(reached.role, width, scheme)
    reached.go(page, places)
    well_made(page, width, scheme)


@pytest.mark.parametrize("path", ["/api/docs", "/admin/", "/admin/controller/decision/"])
def test_what_lies_beside_the_console_keeps_to_the_same_policy(visit, path):
    page = visit("admin", path)
    settle(page)
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
    rates = [None, 0, 0.02, 0.31, 4.3, 359]
    said = page.evaluate(
        "async (v) => { const f = await import('/static/js/format.js'); return v.map((each) => f.rate(each)); }", rates
    )
    assert said == [units.rate(each) for each in rates]


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


def test_a_dialog_and_every_control_can_be_used_from_the_keyboard(visit):
    page = visit("operator", "/patterns/")
    page.get_by_role("button", name="Drain").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    expect(dialog.get_by_role("button", name="Go back")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_a_banner_is_one_text_whatever_is_in_it(visit):
    """Each piece of it was once a column of its own, wider than a narrow screen."""
    page = visit("operator", "/patterns/")
    page.set_viewport_size({"width": 390, "height": 800})
    banner = page.locator(".banner", has_text="ray/default")
    assert banner.evaluate("(box) => box.scrollWidth - box.clientWidth") == 0
    moment, box = banner.locator("time").bounding_box(), banner.bounding_box()
    assert moment["y"] > box["y"] + moment["height"], "it is in the second line, or a later one"


def frames(page, received, count):
    """Wait for so many more frames, and until the page has drawn the last one."""
    enough = len(received) + count
    while len(received) < enough:
        page.wait_for_timeout(50)
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def test_nothing_moves_while_frames_arrive(visit):
    """Layout shifts without any input, over twenty live updates."""
    page, received = visit("viewer"), []

    def keep(text):
        received.append(text)

    page.on("websocket", lambda socket: socket.on("framereceived", keep))
    page.reload()
    settle(page)
    frames(page, received, 5)  # the first ones fill the page
    page.evaluate(
        """() => { window.shift = 0; new PerformanceObserver((list) => {
             for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
           }).observe({ type: "layout-shift" }); }"""
    )
    frames(page, received, 20)
    assert page.evaluate("window.shift") < 0.1
