"""One stack and one Chromium a session, one sign-in a role; trouble in the browser fails the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, expect, sync_playwright

from tests.browser.every_page.places import Places, places_of
from tests.browser.running.caller import Caller, engine_of_its_own
from tests.browser.running.stack import Stack, chromium, running

expect.set_options(timeout=15_000)  # a page with charts on a busy machine
ROLES = ("viewer", "operator", "admin")
LANE = "lane"


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with running() as started:
        yield started


@pytest.fixture(scope="session")
def engine() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = chromium(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def caller(stack: Stack) -> Caller:
    return Caller(stack, "admin")


@pytest.fixture(scope="session")
def lane(caller: Caller) -> str:
    """A model with one slow lane: one engine, one request at a time, nobody else's traffic."""
    engine_of_its_own(caller, LANE)
    return LANE


@pytest.fixture(scope="session")
def places(stack: Stack, caller: Caller, lane: str) -> Places:
    """What the addresses of pages name: a request, a decision, an experiment that is done, and so on."""
    return places_of(stack, caller, f"{lane}-1")


@pytest.fixture(scope="session")
def signed_in(stack: Stack, engine: Browser) -> dict[str, Any]:
    """The cookies of one sign-in a role."""
    states = {}
    for role in ROLES:
        context = engine.new_context(base_url=stack.console)
        sign_in(context.new_page(), *stack.person(role))
        states[role] = context.storage_state()
        context.close()
    return states


class Trouble:
    """What a person would see in the browser's own console: errors, warnings, failed requests, answers above 399."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.expected: tuple[str, ...] = ()

    def watch(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.seen.append(f"page error: {error}"))
        page.on("requestfailed", self._failed)
        page.on("response", self._answered)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.seen.append(f"console {message.type}: {message.text}")

    def _failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # a page left before all of it had come
            self.seen.append(f"failed: {request.url} {request.failure}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.seen.append(f"answered {response.status}: {response.url}")

    def unexpected(self) -> list[str]:
        return [each for each in self.seen if not any(part in each for part in self.expected)]


@pytest.fixture(scope="session")
def watcher() -> Trouble:
    return Trouble()


@pytest.fixture
def trouble(watcher: Trouble) -> Iterator[Trouble]:
    """Fails the test at its end; a test that provokes trouble names it in `expected`."""
    watcher.seen, watcher.expected = [], ()
    yield watcher
    assert not watcher.unexpected(), "\n".join(watcher.unexpected())


@pytest.fixture(scope="session")
def opened(stack: Stack, engine: Browser, signed_in: dict[str, Any], watcher: Trouble) -> Callable[..., Page]:
    """A new browser of somebody of that role, signed in (None: of nobody), on no page yet. `more`: of its context."""

    def open_context(role: str | None, width: int, scheme: str, **more: Any) -> Page:
        context = engine.new_context(
            base_url=stack.console,
            viewport={"width": width, "height": 900},
            color_scheme=scheme,  # type: ignore[arg-type]
            storage_state=signed_in[role] if role else None,
            **{"timezone_id": "UTC", **more},
        )
        page = context.new_page()
        page.set_default_timeout(60_000)  # a queue that never rests leaves two slow cores little for a click
        watcher.watch(page)
        return page

    return open_context


@pytest.fixture
def visit(opened: Callable[..., Page], trouble: Trouble) -> Iterator[Callable[..., Page]]:
    """`visit("operator", "/queue/")`: that person's new browser, on that page. It ends with the test."""
    pages: list[Page] = []

    def open_page(role: str | None, path: str = "/", width: int = 1280, scheme: str = "light", **more: Any) -> Page:
        pages.append(opened(role, width, scheme, **more))
        pages[-1].goto(path)
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()


@pytest.fixture(scope="module")
def tabs() -> Iterator[dict[tuple[str | None, int, str], Page]]:
    """Those that were opened; they end with the module."""
    known: dict[tuple[str | None, int, str], Page] = {}
    yield known
    for page in known.values():
        page.context.close()


@pytest.fixture
def tab(
    opened: Callable[..., Page], tabs: dict[tuple[str | None, int, str], Page], trouble: Trouble
) -> Iterator[Callable[..., Page]]:
    """`tab("viewer", 390, "dark")`: one browser a person, width and scheme, for tests that only look. On no page."""
    used: list[Page] = []

    def take(role: str | None, width: int = 1280, scheme: str = "light") -> Page:
        key = (role, width, scheme)
        if key not in tabs:
            tabs[key] = opened(*key)
        used.append(tabs[key])
        return tabs[key]

    yield take
    for page in used:
        page.goto("about:blank")  # nothing of it goes on while the next test looks at another page


def sign_in(page: Page, name: str, password: str, path: str = "/classes/") -> None:
    """`path`: where it leads to; a page that is drawn soon if it does not matter."""
    page.goto(f"/login/?next={path}")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(lambda url: urlsplit(url).path == path)  # that of the form ends with `path` too
