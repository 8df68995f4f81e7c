"""Pages that have no address of their own: what a person has to do to see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from playwright.sync_api import Page, expect

from tests.browser.every_page.places import Places

SIMULATED_MS = 100_000  # longer than a preview may take


class Reached(NamedTuple):
    """`role`: None for nobody signed in. `status`: what the browser's console complains of, 200 for nothing."""

    name: str
    role: str | None
    go: Callable[[Page, Places], None]
    status: int = 200


def login(page: Page, places: Places) -> None:
    page.goto("/login/")


def wrong_password(page: Page, places: Places) -> None:
    page.goto("/login/")
    page.get_by_label("Username").fill("operator")
    page.get_by_label("Password").fill("not this one")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("Incorrect username or password")


def key_made(page: Page, places: Places) -> None:
    page.goto(f"/tenants/{places['tenant']}/")
    page.get_by_label("Key name").fill("for a look")
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_role("heading", name="New API key for a look")).to_be_visible()


def token_made(page: Page, places: Places) -> None:
    page.goto(f"/service-accounts/{places['account']}/")
    page.get_by_role("button", name="Create token").click()
    expect(page.get_by_role("heading", name="New token of deployer")).to_be_visible()


def class_wrong(page: Page, places: Places) -> None:
    page.goto(f"/classes/{places['class']}/")
    page.get_by_label("TTFT").fill("0")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Not saved. Correct the marked fields.")).to_be_visible()


def class_preview(page: Page, places: Places) -> None:
    page.goto(f"/classes/{places['class']}/")
    page.get_by_label("TTFT").fill("0.2")
    page.get_by_role("button", name="Run simulation").click()
    expect(page.get_by_role("region", name="Simulation result")).to_be_visible(timeout=SIMULATED_MS)


def forbidden(page: Page, places: Places) -> None:
    page.goto("/classes/new/")
    expect(page.get_by_role("heading", name="Access denied")).to_be_visible()


def expired_form(page: Page, places: Places) -> None:
    """As when the browser forgot its cookie, or another site made the form."""
    page.goto(f"/classes/{places['class']}/")
    page.locator('main form[method="post"] input[name="csrfmiddlewaretoken"]').first.evaluate(
        "(input) => { input.value = 'x'.repeat(64); }"
    )
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="The form could not be verified")).to_be_visible()


REACHED = (
    Reached("login", None, login),
    Reached("login-refused", None, wrong_password),
    Reached("key-made", "admin", key_made),
    Reached("token-made", "admin", token_made),
    Reached("class-wrong", "operator", class_wrong, 422),
    Reached("class-preview", "operator", class_preview),
    Reached("forbidden", "viewer", forbidden, 403),
    Reached("expired-form", "operator", expired_form, 403),
)
