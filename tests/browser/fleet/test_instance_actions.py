"""One instance through all that a person may do with it: each step is asked first, said, recorded, and happens."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from playwright.sync_api import expect

from tests.browser.running.caller import busy, engine_of_its_own, within

pytestmark = [pytest.mark.browser, pytest.mark.long(65)]

NAME = "acted"
LOADS = "engine=0.3,host=0.3,disk=0.3"  # emulated, in seconds
REACHED_S = 60.0


class Step(NamedTuple):
    """`asks`: the question before it is done; `yes`: the answer; `left`: what the instance's record says at the end."""

    button: str
    asks: str
    yes: str
    said: str
    kind: str
    left: tuple[str, str]
    shown: str


AWAKE = ("weights", "present")
STEPS = (
    Step("Load weights", "Load the weights of", "Load weights", "is loading its weights", "load_ordered", AWAKE,
         "ready"),
    Step("Sleep", "Put {id} to sleep?", "Sleep", "will sleep once", "sleep_ordered",
         ("weights", "asleep"), "asleep"),
    Step("Wake", "Wake {id}?", "Wake", "is waking up", "load_ordered", AWAKE, "ready"),
    Step("Drain", "Drain {id}?", "Drain", "receives no new requests", "drained", ("observed_state", "draining"),
         "draining"),
    Step("Cancel drain", "Cancel the drain of {id}?", "Cancel drain", "receives requests again",
         "undrained", ("observed_state", "ready"), "ready"),
    Step("Stop", "Stop {id} now?", "Stop", "is stopping", "stopped", ("observed_state", "stopped"), "stopped"),
)  # fmt: skip
BUTTONS = {*(step.button for step in STEPS), "Sleep (level 2)"}
POSSIBLE = {
    "warm": {"Load weights", "Drain", "Stop"},
    "asleep": {"Wake", "Drain", "Stop"},
    "ready": {"Sleep", "Sleep (level 2)", "Drain", "Stop"},
    "draining": {"Cancel drain", "Stop"},
    "stopped": set(),
}


def buttons_on(page):
    return {text for text in page.get_by_role("main").get_by_role("button").all_inner_texts() if text in BUTTONS}


def recorded(caller, step, instance):
    return len(caller.recorded(f"instance_{step.kind}", subject=instance, actor="operator"))


def take(page, step, instance):
    page.get_by_role("button", name=step.button, exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(step.asks.format(id=instance))
    dialog.get_by_role("button", name=step.yes, exact=True).click()
    expect(page.get_by_role("status").filter(has_text=step.said)).to_be_visible()


def test_an_instance_is_loaded_put_to_sleep_woken_drained_taken_back_and_stopped(visit, stack, caller):
    instance = engine_of_its_own(caller, NAME, weights="absent", emulated_load_s=LOADS)
    address, state = f"/fleet/instances/{instance}/", "warm"
    page, looker = visit("operator", address), visit("viewer", address)
    with ExitStack() as running:
        for step in STEPS:
            page.goto(address)
            for each in (page, looker):  # one reloaded, one that moved by itself
                expect(each.locator("h1 + .lead")).to_contain_text(state)
            assert buttons_on(page) == POSSIBLE[state], state
            assert buttons_on(looker) == set(), state
            if step.button == "Drain":  # an empty one is gone before anybody could take the drain back
                within(30, lambda: stack.ask({"model": NAME, "prompt": "Hi", "max_tokens": 1}).status_code == 200)
                running.enter_context(busy(stack, NAME))
            before = recorded(caller, step, instance)
            take(page, step, instance)
            assert recorded(caller, step, instance) == before + 1, step.button
            name, value = step.left
            within(REACHED_S, lambda: caller.get(f"instances/{instance}")[name] == value)  # noqa: B023
            state = step.shown
    page.goto(address)
    for each in (page, looker):
        expect(each.locator("h1 + .lead")).to_contain_text("stopped")
    assert buttons_on(page) == POSSIBLE["stopped"]


def test_who_says_no_leaves_the_instance_as_it_is(visit, caller, lane):
    instance = f"{lane}-1"
    page = visit("operator", f"/fleet/instances/{instance}/")
    for button in ("Sleep", "Drain", "Stop"):
        page.get_by_role("button", name=button, exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Go back").click()
        expect(page.get_by_role("dialog")).to_be_hidden()
    page.reload()
    expect(page.locator("h1 + .lead")).to_contain_text("ready")
    decisions = caller.get("decisions", subject=instance, actor="operator")["items"]
    assert decisions == []


def test_a_page_that_is_out_of_date_does_nothing_and_shows_the_differences(visit, caller, trouble):
    """Two operators before one instance: the second one acts on what it was."""
    trouble.expected = ("412",)
    instance = ready_one(caller)
    first, second = (visit("operator", f"/fleet/instances/{instance}/role/") for _ in range(2))
    first.get_by_role("button", name="Change role to decode").click()
    expect(first.get_by_role("status").filter(has_text=f"The role of {instance} is now decode")).to_be_visible()
    second.get_by_role("button", name="Change role to decode").click()
    expect(second.get_by_role("alert")).to_contain_text(f"{instance} has changed since you opened the page")
    expect(second.get_by_role("row", name=re.compile("^role collocated decode$"))).to_be_visible()
    expect(second.get_by_role("row", name=re.compile("operator"))).to_contain_text(instance)
    expect(second.get_by_text(f"The role of {instance} is decode already.")).to_be_visible()
    expect(second.get_by_role("button", name="Change role to decode")).to_have_count(0)
    second.get_by_role("link", name=f"Back to {instance}").click()
    expect(second).to_have_url(re.compile(f"/fleet/instances/{instance}/$"))
    first.goto(f"/fleet/instances/{instance}/role/")
    first.get_by_role("button", name="Change role to collocated").click()
    expect(first.get_by_role("status").filter(has_text=f"The role of {instance} is now collocated")).to_be_visible()


def test_a_role_is_set_after_saying_what_will_happen_and_taken_back(visit, caller):
    name = ready_one(caller)
    before = len(caller.recorded("instance_role_set", subject=name))
    page = visit("operator", "/fleet/")
    page.get_by_role("main").get_by_role("link", name=name).first.click()
    page.get_by_role("link", name="Change role").click()
    expect(page.get_by_role("button", name="Change role to prefill")).to_be_disabled()
    expect(page.locator("main")).to_contain_text("Change another instance to decode first")
    expect(page.locator("main")).to_contain_text("it receives no requests until it has one")
    page.get_by_role("button", name="Change role to decode").click()
    expect(page.get_by_role("status").filter(has_text=f"The role of {name} is now decode")).to_be_visible()
    expect(page.locator("h1 + .lead")).to_contain_text("decode instance of demo")
    page.get_by_role("link", name="Change role").click()
    page.get_by_role("button", name="Change role to collocated").click()
    expect(page.locator("h1 + .lead")).to_contain_text("collocated instance of demo")
    assert len(caller.recorded("instance_role_set", subject=name)) == before + 2


def ready_one(caller):
    """An instance of the demo, the oldest: the scaler takes the youngest first."""
    query = {"model": "demo", "desired_state": "running", "observed_state": "ready", "role": "collocated"}
    within(60, lambda: len(caller.get("instances", **query)["items"]) >= 2)
    return min(caller.get("instances", **query)["items"], key=lambda each: each["created_at"])["id"]
