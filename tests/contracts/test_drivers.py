"""Gateway and simulator drive the same scheduler: each performs every action, so neither leaves one out unnoticed."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from api.openai.runtime import Runtime
from controller.core import events as ev
from controller.core.decisions import Decision
from controller.dispatch import build_dispatcher, build_scheduler
from controller.simulator import Demand, Simulation, SimulationSettings
from tests.controller.dispatch.fleet import request
from tests.controller.simulator.runs import PATIENT, SMALL

ACTIONS = set(get_args(ev.Action))
OF_STAGES = {ev.Place, ev.Abort, ev.FreeKv, ev.PrefillAgain, ev.LeftToLease}  # never of collocated instances


class NobodyListens:
    def ended(self, *_: object, **__: object) -> None:
        raise AssertionError("no request was sent")


def simulation(*roles: str, demands: tuple[Demand, ...] = ()) -> Simulation:
    settings = SimulationSettings(tuple(replace(SMALL, role=role) for role in roles))
    return Simulation(settings, build_dispatcher("slackline"), demands)


def test_the_gateway_performs_every_action() -> None:
    scheduler = build_scheduler("slackline")
    runtime = Runtime(scheduler, {}, NobodyListens(), handle=scheduler.handle)
    assert runtime.performs.keys() == ACTIONS


def test_the_simulator_performs_every_action() -> None:
    assert simulation("prefill", "decode").performs.keys() == ACTIONS
    assert simulation("collocated").performs.keys() == ACTIONS - OF_STAGES


def test_an_action_that_a_driver_does_not_know_is_an_error_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise be lost without a word, and the request with it."""
    made = simulation("collocated", demands=(Demand("a", 0.0, 10, 5, PATIENT, max_tokens=5),))
    asked = request("a")
    place = ev.Place(asked, "p", "d", 0, Decision("place", "most_slack", "a", 0.0, {}))
    monkeypatch.setattr(made.scheduler, "handle", lambda events, now: ev.Reply([place], None))
    with pytest.raises(KeyError):
        made.run()


def test_a_first_token_that_was_the_last_is_answered_by_its_prefill_instance() -> None:
    """The engine cannot know it beforehand, and the prompt is computed again for the client's format."""
    one = Demand("a", 0.0, 100, 1, PATIENT, max_tokens=50)
    made = simulation("prefill", "decode", demands=(one,))
    seen: list[str] = []
    handle = made.scheduler.handle

    def heard(events: list[ev.Event], now: float) -> ev.Reply:
        reply = handle(events, now)
        seen.extend(type(each).__name__ for each in (*events, *reply.actions))
        return reply

    made.scheduler.handle = heard  # type: ignore[method-assign, assignment]
    (record,) = made.run().records
    prefill_s = 0.004 + 5e-5 * 100 + 1e-9 * 100**2
    assert record.ttft_s == pytest.approx(2 * prefill_s)
    assert (record.instance, record.prefill_instance, record.output_tokens) == ("engine-0", "", 1)
    order = ("Send", "AnsweredWhole", "AnswerThere", "FirstToken", "Finished")
    assert [name for name in seen if name in order] == list(order)
