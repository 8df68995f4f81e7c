"""Gateway and simulator drive the same scheduler: each performs every action, so neither leaves one out unnoticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest

from api.openai.runtime import Runtime
from controller.core import events as ev
from controller.core.decisions import Decision
from controller.core.types import Outcome
from controller.dispatch import build_dispatcher, build_scheduler
from controller.simulator import Demand, Failure, LinkSettings, Simulation, SimulationSettings
from tests.controller.dispatch.fleet import request
from tests.controller.simulator.runs import PATIENT, SMALL

ACTIONS = set(get_args(ev.Action))
OF_STAGES = {ev.Place, ev.FreeKv, ev.PrefillAgain, ev.LeftToLease}  # never of collocated instances


class NobodyListens:
    def ended(self, *_: object, **__: object) -> None:
        raise AssertionError("no request was sent")


def simulation(*roles: str, demands: tuple[Demand, ...] = (), **more: Any) -> Simulation:
    settings = SimulationSettings(tuple(replace(SMALL, role=role) for role in roles), **more)
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
    seen = heard(made)
    (record,) = made.run().records
    prefill_s = 0.004 + 5e-5 * 100 + 1e-9 * 100**2
    assert record.ttft_s == pytest.approx(2 * prefill_s)
    assert (record.instance, record.prefill_instance, record.output_tokens) == ("engine-0", "", 1)
    order = ("Send", "AnsweredWhole", "AnswerThere", "FirstToken", "Finished")
    assert [name for name in map(_name, seen) if name in order] == list(order)


def test_the_simulator_reports_a_call_that_died_before_its_gateway_knew_that_the_kv_had_landed() -> None:
    """As the gateway does for each call at an instance that is down. That nothing is lost, the scheduler judges."""
    one = Demand("a", 0.0, 100, 20, PATIENT, max_tokens=20)
    landed_at = 0.004 + 5e-5 * 100 + 1e-9 * 100**2 + 3 * 0.05
    down = (Failure(1, landed_at + 0.02, None),)
    free = LinkSettings(bandwidth_gb_s=1e9, latency_s=0.0)
    made = simulation("prefill", "decode", "decode", demands=(one,), network_s=0.05, links=free, failures=down)
    seen = heard(made)
    (record,) = made.run().records
    assert (record.outcome, record.instance) == (Outcome.OK, "engine-2")
    (failed,) = [each for each in seen if isinstance(each, ev.EngineFailed)]
    assert (failed.request_id, failed.instance_id, failed.at_fault) == ("a", "engine-1", "instance")


def heard(made: Simulation) -> list[object]:
    """The events and actions of the run, as they happen."""
    seen: list[object] = []
    handle = made.scheduler.handle

    def hear(events: Sequence[ev.Event], now: float) -> ev.Reply:
        reply = handle(events, now)
        seen.extend((*events, *reply.actions))
        return reply

    made.scheduler.handle = hear  # type: ignore[method-assign]
    return seen


def _name(each: object) -> str:
    return type(each).__name__
