"""A request that is pruned, from the overload to its outcome: two gateways wait for one engine.

*Flows* shows the orders and what became of the request, its own page why it was served last. The preview of the flow
settings then serves the same requests again without pruning.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import requests
from playwright.sync_api import Page, expect

from tests.browser.every_page.looks import beyond, findings_in_both_schemes
from tests.browser.every_page.reached import SIMULATED_MS
from tests.browser.running.caller import Caller, end_engines, engine_of_its_own
from tests.browser.running.stack import Stack
from tests.second_gateway import second_gateway
from workers.supervisor.plan import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.long(50)]
MODEL = "crowded"
EVERY_S = 0.4  # between two requests at each gateway: the engine takes about a second for one
# Percent of what waits. Five requests come while one ends, so that more than half has to go before a batch is in time,
# and nobody is pruned for less.
DROP_BUDGET = "90"
BODY: dict[str, Any] = {
    "model": MODEL, "prompt": "Sum up. " * 20, "max_tokens": 60, "ignore_eos": True, "slo_class": "summaries",
    "stream": True,
}  # fmt: skip
SPEED = {"prefill_a": 0.01, "prefill_b": 1e-4, "prefill_c": 0, "decode_a": 0.015, "decode_b": 0, "decode_c": 0}
PROFILED = (
    "from controller.models import *; LatencyProfile.objects.create("
    f"model=ServedModel.objects.get(name='{MODEL}'), device_kind='', coefficients={SPEED})"
)


@contextmanager
def overloaded(stack: Stack, urls: list[str]) -> Iterator[None]:
    """Requests go to each of the gateways until this ends, and have their answers then."""
    over = threading.Event()
    head = {"Authorization": f"Bearer {stack.credentials['api_key']}"}

    def send(url: str) -> None:
        requests.post(f"{url}/v1/completions", json=BODY, headers=head, timeout=60)

    def go_on() -> None:
        while not over.wait(EVERY_S):
            for url in urls:
                senders.submit(send, url)

    with ThreadPoolExecutor(64) as senders:
        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def followed(row: str) -> tuple[str, str]:
    """Id and outcome of a request. Read at once, since the next one may take its place."""
    found = re.search(r"(req-\w+)[\s\S]*?(attained|missed)", row)
    assert found, row
    return found[1], found[2]


def profiled(stack: Stack) -> None:
    """A simulation needs to know how fast the engine is."""
    told = {**psutil.Process(stack.pid("console")).environ()}
    subprocess.run([sys.executable, "manage.py", "shell", "-c", PROFILED], cwd=ROOT, env=told, check=True, timeout=120)


def simulated_without(page: Page) -> None:
    """The overload again, as it was and with nothing pruned. Both gateways still run."""
    page.goto("/flows/settings/")
    page.get_by_label("Drop budget").fill("0")
    models = page.get_by_label("Model", exact=True)
    if models.count():  # other tests have sent requests for another one
        models.select_option(MODEL)
    page.get_by_role("button", name="Run simulation").click()
    expect(page.get_by_role("region", name="Simulation result")).to_be_visible(timeout=SIMULATED_MS)
    shown = page.locator("[data-simulated]")
    before, after = (
        shown.locator("div", has=page.get_by_text(f"Drop budget {when}")).last for when in ("before", "after")
    )
    expect(before).to_contain_text(re.compile(rf"{DROP_BUDGET} %: \d+ requests? pruned, \d+ of them in time"))
    expect(after).to_contain_text(re.compile(r"0 %: no request pruned"))
    expect(shown).to_contain_text("2 gateways take the requests in turn.")
    assert beyond(page, 1280) == 0
    assert findings_in_both_schemes(page, "light") == []
    page.get_by_label("Drop budget").fill("50")
    expect(shown).to_contain_text("This simulation is for earlier values. Run it again for the current ones.")
    page.goto("/flows/")


@pytest.fixture
def one_engine(caller: Caller) -> Iterator[None]:
    engine_of_its_own(caller, MODEL)
    yield
    end_engines(caller, MODEL)


@pytest.mark.usefixtures("one_engine")
def test_a_pruned_request_is_followed_to_its_outcome(stack, visit):
    page = visit("operator", "/flows/settings/")
    page.get_by_label("Drop budget").fill(DROP_BUDGET)
    page.get_by_role("button", name="Save").click()
    part = page.locator("[data-part=flows]")
    expect(part).to_contain_text("No request is pruned now.")
    with second_gateway(stack.pid("gateway"), stack.folder / "logs" / "second.log") as second:
        with overloaded(stack, [stack.gateway, second]):
            expect(part).to_contain_text(re.compile(r"\d+ of \d+ requests that .* at 2 gateways, are served last now"))
            row = part.locator("tr", has=page.locator("a.mono")).first
            expect(row).to_be_visible(timeout=30_000)
        expect(part).to_contain_text("No request is pruned now.", timeout=30_000)
        name, outcome = followed(row.inner_text())
        profiled(stack)
        simulated_without(page)
    page.goto(f"/requests/{name}/")
    main = page.get_by_role("main")
    expect(main).to_contain_text("served last, so that other requests are in time")
    expect(main).to_contain_text("its batch would be late by")
    expect(main).to_contain_text(f"{MODEL}-1")
    expect(main.locator(".badge").first).to_contain_text(outcome)
    page.goto("/flows/")
    page.get_by_role("link", name="Edit flow settings").click()
    page.get_by_label("Drop budget").fill("0")
    page.get_by_role("button", name="Save").click()
    expect(part.get_by_role("heading", name="Pruning off")).to_be_visible()
