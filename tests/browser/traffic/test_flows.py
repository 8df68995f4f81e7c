"""Flow policy and pruning, switched on and off in the console: transfer daemon and coordinator of `make up` follow."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from tests.browser.every_page.looks import beyond, findings_in_both_schemes
from tests.browser.every_page.reached import SIMULATED_MS
from tests.browser.running.caller import within

pytestmark = [pytest.mark.browser, pytest.mark.long(60)]


def test_an_operator_switches_it_on_and_back(visit):
    page = visit("operator", "/flows/")
    part = page.locator("[data-part=flows]")
    expect(part).to_contain_text("The flow policy is off")
    expect(part.get_by_role("heading", level=3, name=re.compile("off$"))).to_be_visible()
    part.get_by_role("link", name="Choose a flow policy").click()
    page.get_by_label("Flow policy", exact=True).select_option("mfs")
    page.get_by_label("Ordering of waiting requests").select_option("calm")
    page.get_by_label("Options of the ordering").fill('{"frame_steps": 100}')
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".banner.done")).to_contain_text("Flow settings updated")
    expect(part).to_contain_text("MFS: promoted near the deadline.")
    expect(part).to_contain_text('in the order of calm with {"frame_steps": 100}')
    expect(part.get_by_role("heading", name=re.compile("scheduling$"))).to_be_visible()
    page.get_by_role("link", name=re.compile("^History of the flow settings")).click()
    page.get_by_role("link", name=re.compile("^Revert")).first.click()
    expect(page.get_by_label("Flow policy", exact=True)).to_have_value("off")
    expect(page.get_by_label("Ordering of waiting requests")).to_have_value("")
    page.get_by_role("button", name="Save").click()
    expect(part).to_contain_text("The flow policy is off")
    expect(part.get_by_role("heading", level=3, name=re.compile("off$"))).to_be_visible()


def test_an_operator_switches_pruning_on_and_back(visit, trouble):
    trouble.expected = ("422",)
    page = visit("operator", "/flows/")
    part = page.locator("[data-part=flows]")
    expect(part).to_contain_text("Requests are not pruned.")
    part.get_by_role("link", name="a drop budget").click()
    page.get_by_label("Drop budget").fill("120")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".field", has_text="Drop budget")).to_contain_text("less than or equal to 100")
    page.get_by_label("Drop budget").fill("20")
    page.get_by_role("button", name="Save").click()
    expect(part.get_by_role("heading", name="Pruning on")).to_be_visible()
    expect(part).to_contain_text("Drop budget 20 %")
    expect(part).to_contain_text("No request is pruned now.")
    expect(part).not_to_contain_text("The coordinator has not run")
    page.get_by_role("link", name="Edit flow settings").click()
    page.get_by_label("Drop budget").fill("0")
    page.get_by_role("button", name="Save").click()
    expect(part.get_by_role("heading", name="Pruning off")).to_be_visible()


@pytest.fixture(scope="module")
def recorded(stack, caller):
    """Some requests of the demo's model on record."""
    sent = stack.send(12, slo_class="interactive", max_tokens=20)
    assert [each.result() for each in sent].count(200) >= 10
    model: str = stack.credentials["model"]
    within(20, lambda: len(caller.get("requests", model=model)["items"]) >= 10)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [1280, 390])
def test_an_ordering_is_simulated_before_it_is_saved(visit, recorded, width):
    page = visit("operator", "/flows/settings/", width)
    options, simulated = page.get_by_label("Options of the ordering"), page.locator("[data-simulated]")
    page.get_by_label("Ordering of waiting requests").select_option("calm")
    options.fill('{"frame": 9}')
    expect(options).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#id_ordering_options_error")).to_contain_text("no setting 'frame'")
    options.fill('{"frame_steps": 9}')
    expect(page.locator("#id_ordering_options_error")).to_have_count(0)
    page.get_by_label("Drop budget").fill("20")  # of the one gateway nothing is pruned
    models = page.get_by_label("Model", exact=True)
    if models.count():
        models.select_option(recorded)
    page.get_by_role("button", name="Run simulation").click()
    table = page.get_by_role("region", name="Simulation result")
    expect(table).to_be_visible(timeout=SIMULATED_MS)
    expect(table.locator("tbody tr").first).to_contain_text("all traffic")
    expect(simulated.locator("dl")).to_contain_text("frame_steps 9")
    expect(simulated).to_contain_text("Pruning is not simulated: one gateway is running")
    assert beyond(page, width) == 0
    assert findings_in_both_schemes(page, "light") == []
    page.get_by_label("Ordering of waiting requests").select_option("")
    options.fill("")
    expect(simulated).to_contain_text("This simulation is for earlier values. Run it again for the current ones.")
    page.get_by_role("button", name="Run simulation").click()
    expect(simulated).to_contain_text("The simulation cannot run: one gateway is running")
    page.reload()
    expect(page.get_by_label("Ordering of waiting requests")).to_have_value("")


def test_a_simulation_is_given_up_only_once_its_worker_says_nothing_more(visit):
    """A busy machine takes longer than the thirty seconds that the page waits for a word."""
    page = visit("operator")
    sockets = []

    def keep(socket):
        sockets.append(socket)

    page.route_web_socket("**/ws/experiments", keep)
    page.route("**/flows/settings/preview/", lambda route: route.fulfill(json={"errors": {}, "slug": "preview-slow"}))
    page.clock.install()
    page.goto("/flows/settings/")
    page.get_by_role("button", name="Run simulation").click()
    meter = page.get_by_role("progressbar", name="Simulation progress")
    expect(meter).to_be_visible()
    within(10, lambda: page.evaluate("1") and sockets)
    for step in range(1, 11):
        told = {"slug": "preview-slow", "state": "running", "progress": step / 20, "step": f"step {step}"}
        frame = {"type": "snapshot", "seq": step, "age_s": 0, "stale": False, "data": {"experiments": [told]}}
        sockets[-1].send(json.dumps(frame))
        expect(page.get_by_text(f"step {step}", exact=True)).to_be_visible()
        page.clock.fast_forward(4_000)
    expect(meter).to_be_visible()
    page.clock.fast_forward(31_000)
    expect(page.locator("[data-simulated]")).to_contain_text("The worker is not responding.")
    expect(meter).to_be_hidden()
