"""`make screenshots`: the console under load, light and dark, wide and narrow.

A picture that README.md or a page of docs/ shows goes into docs/screenshots and is tracked; all others go into
build/screenshots, which git ignores. `--shown` takes only the tracked ones.

The screenshots are real: a stack is started, given its demo load and a burst that exceeds the capacity of its engines,
and photographed meanwhile. `fleet-of-200` alone shows the benchmark's data (benchmarks/console/many.py). `scale-out`
is a stack of its own, where real weights are loaded (tests/browser/screenshots/scale_out.py).
`make screenshots PAGES="fleet login"` takes only those pages, `PAGES=--shown` only the tracked pictures.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Locator, Page, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from tests.browser.conftest import sign_in
from tests.browser.every_page.pages import PAGES
from tests.browser.every_page.places import Places, places_of
from tests.browser.every_page.reached import REACHED
from tests.browser.running.caller import Caller
from tests.browser.running.stack import ROOT, Stack, chromium, running
from tests.browser.screenshots.scale_out import scaled_out

TRACKED = ROOT / "docs" / "screenshots"
IGNORED = ROOT / "build" / "screenshots"
SCHEMES = ("light", "dark")
WARM_UP_S = 150.0
BURST = 90
SETTLED_MS = 500
BURST_SEEN_MS = 4000
BURSTS_MAX = 8
WAITING = 20  # requests, in the queue's picture
ENOUGH_WAIT = "least => parseInt(document.querySelector('[data-total]').textContent) >= least"
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
WHOLE = ("overview", "patterns", "instance")  # taken to the end of the page where it is wide
BUSY = ("overview", "queue")  # taken while a burst waits
LEFT_OUT = ("login-refused", "class-wrong")  # states of pages that are there
MANY = "fleet-of-200"
SCALED = ("scale-out", "scale-out-decided", "scale-out-served")  # the pages of the first are all three
PERSON = "operator"  # who looks, but where a page needs somebody else

Go = Callable[[Page, Places], Any]


def shown() -> set[str]:
    """File names of the pictures that a page shows; these alone are tracked."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {name for page in pages for name in re.findall(r"screenshots/([\w-]+\.png)", page.read_text())}


class Camera:
    """Which pictures are taken, and where each goes."""

    def __init__(self, only_shown: bool) -> None:
        self._shown = shown()
        self._only_shown = only_shown

    def wants(self, name: str, kind: str) -> bool:
        return not self._only_shown or f"{name}-{kind}.png" in self._shown

    def take(self, page: Page, name: str, kind: str, *, full_page: bool = False) -> None:
        file = (TRACKED if f"{name}-{kind}.png" in self._shown else IGNORED) / f"{name}-{kind}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=file, full_page=full_page)
        print(file.relative_to(ROOT), flush=True)

    def sizes(self, name: str) -> Iterator[tuple[str, str, int, int]]:
        """Scheme, kind, width and height of each wanted picture of a page."""
        for scheme in SCHEMES:
            for size, (width, height) in SIZES.items():
                if self.wants(name, f"{scheme}-{size}"):
                    yield scheme, f"{scheme}-{size}", width, height


def shots() -> dict[str, tuple[str | None, Go]]:
    """By name: who looks, and how to get there."""

    def by_address(path: str) -> Go:
        return lambda page, places: page.goto(path.format_map(places))

    found: dict[str, tuple[str | None, Go]] = {}
    for listed in PAGES:
        found[listed.name] = ("admin" if listed.role == "admin" else PERSON, by_address(listed.path))
    for reached in REACHED:
        if reached.name not in LEFT_OUT:
            found[reached.name] = (reached.role, reached.go)
    return found


def main() -> None:
    known = shots()
    names = [*known, MANY, SCALED[0]]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"all but those named: {', '.join(names)}")
    parser.add_argument("--shown", action="store_true", help="only the pictures that README.md or docs/ shows")
    args = parser.parse_args()
    if unknown := set(args.pages) - set(names):
        parser.error(f"no such page: {', '.join(sorted(unknown))}")
    camera = Camera(args.shown)
    wanted = [name for name in args.pages or names if any(True for _ in _sized(camera, name))]
    if MANY in wanted:
        wanted.remove(MANY)
        with many_instances() as many:
            photograph_many(camera, *many)
    if SCALED[0] in wanted:
        wanted.remove(SCALED[0])
        with scaled_out() as (stack, paths):
            photograph_scaled(camera, stack, paths)
    if wanted:
        photograph(camera, {name: known[name] for name in wanted})


def _sized(camera: Camera, name: str) -> Iterator[object]:
    for each in SCALED if name == SCALED[0] else (name,):
        yield from camera.sizes(each)


def photograph(camera: Camera, wanted: Mapping[str, tuple[str | None, Go]]) -> None:
    with running(demo_load=True) as stack, sync_playwright() as playwright:
        warm_up(stack)
        browser = chromium(playwright)
        people = {None: None, **{role: signed_in(browser, stack, role) for role in ("viewer", "operator", "admin")}}
        caller = Caller(stack, "admin")
        seen = worth_a_look(caller)  # before anything is asked for just to be there
        places = places_of(stack, caller, serving(caller)) | seen
        for name, (role, go) in wanted.items():
            for scheme, kind, width, height in camera.sizes(name):
                page = browser.new_context(
                    base_url=stack.console,
                    viewport={"width": width, "height": height},
                    color_scheme=scheme,
                    storage_state=people[role],
                    device_scale_factor=1,
                ).new_page()
                go(page, places | {"instance": serving(caller)})
                take(camera, page, stack, name, kind)
                page.context.close()
        browser.close()


@contextmanager
def many_instances() -> Iterator[tuple[str, str, str]]:
    """A console over the benchmark's data: its address, a user name and a password."""
    command = [sys.executable, "-m", "benchmarks.console.many"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        try:
            yield told["url"], told["name"], told["password"]
        finally:
            process.stdin.close()


def photograph_many(camera: Camera, url: str, name: str, password: str) -> None:
    with sync_playwright() as playwright:
        browser = chromium(playwright)
        for scheme, kind, width, height in camera.sizes(MANY):
            context = browser.new_context(
                base_url=url, viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page = context.new_page()
            sign_in(page, name, password, "/fleet/")
            page.wait_for_timeout(BURST_SEEN_MS)
            camera.take(page, MANY, kind)
            context.close()
        browser.close()


def photograph_scaled(camera: Camera, stack: Stack, paths: list[str]) -> None:
    with sync_playwright() as playwright:
        browser = chromium(playwright)
        state = signed_in(browser, stack, PERSON)
        for name, path in zip(SCALED, paths, strict=True):
            for scheme, kind, width, height in camera.sizes(name):
                context = browser.new_context(
                    base_url=stack.console,
                    viewport={"width": width, "height": height},
                    color_scheme=scheme,
                    storage_state=state,
                )
                page = context.new_page()
                page.goto(path)
                page.wait_for_load_state("networkidle")
                page.wait_for_timeout(SETTLED_MS)
                camera.take(page, name, kind, full_page=kind.endswith("wide"))
                context.close()
        browser.close()


def warm_up(stack: Stack) -> None:
    print(f"warming up for {WARM_UP_S:.0f} s")
    time.sleep(WARM_UP_S / 2)
    for _ in range(3):  # so that there is something to explain
        stack.send(BURST, slo_class="interactive", max_tokens=200)
        time.sleep(WARM_UP_S / 6)


def worth_a_look(caller: Caller) -> Places:
    """A miss of the burst that was served, and what the scaler did about it, where there are any."""
    missed = caller.get("requests", attained="false", outcome="ok")["items"]
    scaled = caller.recorded("scale_out")
    found = {"missed": missed, "decision": scaled}
    return {name: str(items[0]["id"]) for name, items in found.items() if items}


def serving(caller: Caller) -> str:
    """An instance that serves at this moment: the scaler stops some and starts others."""
    return str(caller.first("instances", model="demo", desired_state="running", observed_state="ready")["id"])


def signed_in(browser: Browser, stack: Stack, role: str) -> Any:
    context = browser.new_context(base_url=stack.console)
    sign_in(context.new_page(), *stack.person(role))
    state = context.storage_state()
    context.close()
    return state


def take(camera: Camera, page: Page, stack: Stack, name: str, kind: str) -> None:
    if name in BUSY:
        burst(page, stack)
    page.wait_for_load_state("networkidle")
    if name == "queue":  # what a command on all looks like; on a narrow screen it comes into view
        all_waiting(page, stack).click()
    page.wait_for_timeout(SETTLED_MS)
    camera.take(page, name, kind, full_page=kind.endswith("wide") and name in WHOLE)


def all_waiting(page: Page, stack: Stack) -> Locator:
    """The button that chooses all, once a good many wait: a fleet that has grown takes a burst or two at once."""
    for _ in range(BURSTS_MAX):
        try:
            page.wait_for_function(ENOUGH_WAIT, arg=WAITING, timeout=BURST_SEEN_MS / 2)
            break
        except PlaywrightTimeout:
            stack.send(2 * BURST, slo_class="analytics", max_tokens=400)
    return page.get_by_role("button", name=re.compile("^Select all .* matching$"))


def burst(page: Page, stack: Stack) -> None:
    """More than the fleet takes at once, over two classes, and a moment for the page to show it."""
    stack.send(BURST // 3, slo_class="interactive", max_tokens=200)
    stack.send(BURST, slo_class="analytics", max_tokens=400)
    page.wait_for_timeout(BURST_SEEN_MS)


if __name__ == "__main__":
    main()
