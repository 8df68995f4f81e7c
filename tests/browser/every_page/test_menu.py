"""All pages from a narrow screen: a menu that shows there is more, by finger, by keyboard, without script."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from console.navigation import PAGES
from tests.browser.every_page.looks import beyond, serious_findings

pytestmark = [pytest.mark.browser, pytest.mark.long(45)]

TITLES = [title for _, title, _ in PAGES]
NARROW = 390
LONG_ZONE = "America/Argentina/Buenos_Aires"
# The tops of what stands beside one another in the line of the person, in rows: parts that wrap have several.
ROWS = """(line) => {
  const range = document.createRange(), tops = [];
  const walker = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    range.selectNodeContents(walker.currentNode);
    for (const box of range.getClientRects()) if (box.width > 1) tops.push(box.bottom);
  }
  tops.sort((one, other) => one - other);
  return tops.filter((top, index) => index === 0 || top - tops[index - 1] > 6).length;
}"""
CUT = "(part) => part.scrollWidth > part.clientWidth"


def links(page):
    return page.get_by_role("navigation", name="Main").get_by_role("link")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_has_a_button_for_all_pages(visit, scheme):
    page = visit("viewer", "/audit/", NARROW, scheme)
    expect(links(page)).to_have_count(0)
    page.get_by_role("button", name="Menu").click()
    expect(links(page)).to_have_text(TITLES)
    for each in links(page).all():
        expect(each).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("navigation").get_by_role("link", name="Audit")).to_have_attribute("aria-current", "page")
    assert serious_findings(page) == []
    assert beyond(page, NARROW) == 0
    links(page).filter(has_text="Fleet").click()
    expect(page.get_by_role("heading", level=1, name="Fleet")).to_be_visible()
    expect(links(page)).to_have_count(0)


def test_a_low_screen_scrolls_its_menu(visit):
    page = visit("viewer", "/classes/", NARROW)
    page.set_viewport_size({"width": NARROW, "height": 360})
    page.get_by_role("button", name="Menu").click()
    last = links(page).last
    last.scroll_into_view_if_needed()
    expect(last).to_be_in_viewport(ratio=1)


def test_without_script_the_keyboard_opens_it_walks_through_it_and_closes_it(engine, stack, signed_in):
    context = engine.new_context(
        base_url=stack.console,
        viewport={"width": NARROW, "height": 900},
        storage_state=signed_in["viewer"],
        java_script_enabled=False,
    )
    page = context.new_page()
    page.goto("/classes/")
    for _ in range(3):  # past the link to the content and the one to the first page
        page.keyboard.press("Tab")
    menu = page.get_by_role("button", name="Menu")
    expect(menu).to_be_focused()
    page.keyboard.press("Enter")
    expect(links(page)).to_have_text(TITLES)
    page.keyboard.press("Tab")
    expect(links(page).first).to_be_focused()
    page.keyboard.press("Escape")
    expect(links(page)).to_have_count(0)
    expect(menu).to_be_focused()
    page.keyboard.press("Space")
    for _ in range(TITLES.index("Scaling") + 1):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/scaling/")
    context.close()


@pytest.mark.parametrize("width", [320, NARROW, 600, 900])
def test_a_narrow_screen_has_the_person_and_the_time_zone_in_one_row(visit, width):
    page = visit("operator", "/classes/", width, timezone_id=LONG_ZONE)
    line = page.locator(".who")
    expect(line).to_contain_text(page.evaluate("Intl.DateTimeFormat().resolvedOptions().timeZone"))
    assert line.evaluate(ROWS) == 1
    bar = page.locator(".sidebar-inner").bounding_box()
    assert bar["height"] < 100, "two rows at most"
    if width >= NARROW:
        assert not any(part.evaluate(CUT) for part in line.locator("> span:visible").all()), "all of it is shown"
    page.evaluate("document.querySelector('.who strong').textContent = 'x'.repeat(150)")  # the longest name
    assert line.evaluate(ROWS) == 1
    assert beyond(page, width) == 0
    for each in (page.get_by_role("link", name="Sessions"), page.get_by_role("button", name="Sign out")):
        expect(each).to_be_in_viewport(ratio=1)
    assert serious_findings(page) == []


@pytest.mark.parametrize("width", [1280, 962])
def test_a_wide_screen_has_them_in_its_margin(visit, width):
    page = visit("viewer", "/classes/", width)
    expect(page.get_by_role("button", name="Menu")).to_have_count(0)
    expect(links(page)).to_have_text(TITLES)
    assert beyond(page, width) == 0
