"""One stack and one Chromium a session; a fresh profile for each person; trouble in the browser fails the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, expect, sync_playwright

from tests.browser.stack import Stack, chromium, running

expect.set_options(timeout=15_000)  # a page with charts on a busy machine


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


@pytest.fixture
def trouble() -> Iterator[Trouble]:
    """Fails the test at its end; a test that provokes trouble names it in `expected`."""
    found = Trouble()
    yield found
    assert not found.unexpected(), "\n".join(found.unexpected())


@pytest.fixture
def visit(stack: Stack, engine: Browser, trouble: Trouble) -> Iterator[Callable[..., Page]]:
    """`visit("operator", "/queue/")`: that person's new browser, signed in, on that page."""
    contexts: list[Any] = []

    def open_page(role: str | None, path: str = "/", width: int = 1280, scheme: str = "light") -> Page:
        context = engine.new_context(
            base_url=stack.console, viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        trouble.watch(page)
        if role is None:
            page.goto(path)
        else:
            sign_in(page, *stack.person(role), path)
        return page

    yield open_page
    for context in contexts:
        context.close()


def sign_in(page: Page, name: str, password: str, path: str = "/") -> None:
    page.goto(f"/login/?next={path}")
    page.get_by_label("User name").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"**{path}")
