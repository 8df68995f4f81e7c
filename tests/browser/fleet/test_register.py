"""A running server with an API key joins the fleet through the form, by the name of its key, and serves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.running.caller import within
from tests.workers.engine.process import EngineProcess
from workers.http.fleet_proof import KEY_VARIABLE

pytestmark = pytest.mark.browser

NAME, KEY = "registered", "key-of-the-registered-one"
SERVES_S = 60.0


@pytest.fixture
def server(stack, caller, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    """It answers nobody without its key, which gateways and workers find in their folder."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    caller.post("models", {"name": NAME, "context_tokens": 4096})
    folder = stack.folder / "engine-keys"
    folder.mkdir(exist_ok=True)
    with EngineProcess("--profile", "constant:2ms", "--model", NAME) as engine:
        (folder / "its-key").write_text(f"{engine.url} {KEY}\n")
        yield engine


def fill(page: Page, **values: str) -> None:
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)


def send(page: Page, answer: str) -> None:
    page.get_by_role("button", name="Register server", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Register this server?")
    expect(dialog).to_contain_text("only to the URL in the key's file")
    dialog.get_by_role("button", name=answer).click()
    expect(dialog).to_be_hidden()


def test_a_server_with_a_key_is_registered_and_serves(visit, stack, caller, server, trouble):
    trouble.expected = ("422",)
    page = visit("operator", "/fleet/")
    page.get_by_role("link", name="Register server").click()
    fill(page, Name="gpu-browser", URL=server.url)
    page.get_by_label("Model", exact=True).select_option(label=NAME)
    page.get_by_label("Backend", exact=True).select_option("reference")
    key = page.get_by_label(re.compile("^Name of its API key"))
    key.fill("sk-typed-by-mistake")
    send(page, "Go back")
    assert caller.get("instances", model=NAME)["items"] == []

    send(page, "Register server")
    expect(page.get_by_text("This looks like a key.")).to_be_visible()
    expect(page.get_by_label("URL", exact=True)).to_have_value(server.url)
    assert caller.get("instances", model=NAME)["items"] == []

    key.fill("its-key")
    send(page, "Register server")
    expect(page.get_by_role("status").filter(has_text="gpu-browser registered")).to_be_visible()
    expect(page).to_have_url(re.compile("/fleet/instances/gpu-browser/$"))
    expect(page.get_by_text("file its-key")).to_be_visible()
    body = {"model": NAME, "prompt": "Hello", "max_tokens": 4}
    within(SERVES_S, lambda: stack.ask(body).status_code == 200)
    (made,) = caller.recorded("instance_created", subject="gpu-browser", actor="operator")
    assert made["inputs"]["after"]["key_name"] == "its-key"
    assert KEY not in str(made)


def test_a_viewer_sees_no_way_to_register(visit, trouble):
    trouble.expected = ("403",)
    page = visit("viewer", "/fleet/")
    expect(page.get_by_role("link", name="Register server")).to_have_count(0)
    page.goto("/fleet/new/")
    expect(page.get_by_role("heading", name="Register a server")).to_have_count(0)
