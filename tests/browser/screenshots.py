"""`make screenshots`: the console under load into docs/screenshots, light and dark, wide and narrow.

Everything shown is real: a stack is started, given its demo load and a burst that its engines cannot take at once, and
photographed while it copes.
"""

from __future__ import annotations

import time

from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.conftest import sign_in
from tests.browser.stack import ROOT, Stack, chromium, running

FOLDER = ROOT / "docs" / "screenshots"
WARM_UP_S = 150.0
BURST = 90
FIRST_MISS, COMPARED = "the newest miss", "the newest miss beside one that made it"
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
PAGES = {
    "overview": "/",
    "queue": "/queue/",
    "requests": "/requests/",
    "classes": "/classes/",
    "mapping": "/mappings/",
    "tenants": "/tenants/",
    "tenant": "/tenants/1/",
    "fleet": "/fleet/",
    "instance": "/fleet/instances/engine-1/",
    "role": "/fleet/instances/engine-1/role/",
    "scaling": "/scaling/",
    "audit": "/audit/",
    "patterns": "/patterns/",
    "request": FIRST_MISS,
    "compare": COMPARED,
    "experiments": "/experiments/",
    "class-preview": "/classes/1/",
}
WHOLE = ("overview", "patterns", "instance")  # taken to the end of the page where it is wide
BUSY = ("overview", "queue")  # taken while a burst waits


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with running() as stack, sync_playwright() as playwright:
        print(f"warming up for {WARM_UP_S:.0f} s")
        time.sleep(WARM_UP_S / 2)
        for _ in range(3):  # so that there is something to explain
            stack.send(BURST, slo_class="interactive", max_tokens=200)
            time.sleep(WARM_UP_S / 6)
        browser = chromium(playwright)
        PAGES["experiment"] = ask(browser, stack)
        for scheme in ("light", "dark"):
            for size, (width, height) in SIZES.items():
                take_all(browser, stack, scheme, size, width, height)
        browser.close()


def ask(browser: Browser, stack: Stack) -> str:
    """The last hour with one instance less, carried out; where its result lies."""
    context = browser.new_context(base_url=stack.console)
    page = context.new_page()
    sign_in(page, *stack.person("operator"), "/experiments/")
    page.get_by_role("button", name="The last hour with one instance less").click()
    page.locator('[data-chart="queue"] .main-svg').first.wait_for(timeout=120_000)
    path = page.url.removeprefix(stack.console)
    context.close()
    return path


def take_all(browser: Browser, stack: Stack, scheme: str, size: str, width: int, height: int) -> None:
    context = browser.new_context(
        base_url=stack.console, viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
    )
    page = context.new_page()
    sign_in(page, *stack.person("operator"))
    for name, path in PAGES.items():
        go(page, path)
        if name in BUSY:
            burst(page, stack)
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(500)
        file = FOLDER / f"{name}-{scheme}-{size}.png"
        page.screenshot(path=file, full_page=size == "wide" and name in WHOLE)
        print(file.relative_to(ROOT))
    context.close()


def go(page: Page, path: str) -> None:
    """To a page by its address, or to the newest miss, or to that beside one that made it."""
    if path not in (FIRST_MISS, COMPARED):
        page.goto(path)
        return
    page.goto("/requests/?attained=no")
    page.locator("#request-rows th a").first.click()
    page.wait_for_url("**/requests/req-*/")
    if path == COMPARED:
        page.get_by_role("link", name="Compare with one that made it").click()


def burst(page: Page, stack: Stack) -> None:
    """More than the fleet takes at once, over two classes, and a moment for the page to show it."""
    stack.send(BURST // 3, slo_class="interactive", max_tokens=200)
    stack.send(BURST, slo_class="analytics", max_tokens=400)
    page.wait_for_timeout(4000)


if __name__ == "__main__":
    main()
