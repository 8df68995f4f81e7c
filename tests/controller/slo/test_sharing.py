"""Targets of a call that several equal requests share."""

from __future__ import annotations

from dataclasses import replace

from controller.core.types import Request, Targets
from controller.slo.sharing import call_for, earliest


def request(name: str, arrival: float, targets: Targets, **more) -> Request:
    return Request(name, arrival, targets, prompt_tokens=10, output_tokens=5, **more)


def test_the_first_due_and_the_longest_wait_count_from_the_calls_arrival():
    shared = [
        (0.0, Targets(9.0, 0.2, None, 1.0)),
        (2.0, Targets(3.0, 0.1, 6.0, 4.0)),
        (3.0, Targets(5.0, 0.3, 4.0, 0.0)),
    ]
    assert earliest(shared) == Targets(ttft_s=5.0, tpot_s=0.1, deadline_s=7.0, waiting_time_s=6.0)


def test_without_a_deadline_there_is_none():
    assert earliest([(0.0, Targets(2.0, 0.1)), (1.0, Targets(2.0, 0.1))]).deadline_s is None


def test_the_call_keeps_its_arrival_and_what_an_operator_did_and_is_not_refused():
    first, second = request("a", 10.0, Targets(2.0, 0.1), order=-1), request("b", 11.0, Targets(0.5, 0.1), value=3.0)
    call = call_for([first, second], first, "b")
    assert (call.id, call.arrival, call.order, call.value, call.may_defer) == ("b", 10.0, -1, 3.0, True)
    assert call.ttft_due == second.ttft_due


def test_the_call_has_the_time_of_the_first_workflow_if_all_are_of_one():
    first = request("a", 10.0, Targets(2.0, 0.1, 2.0), workflow="v", workflow_left_s=9.0)
    second = request("b", 11.0, Targets(2.0, 0.1, 2.0), workflow="w", workflow_left_s=6.0)
    assert call_for([first, second], first, "b").workflow_left_s == 7.0
    alone = request("c", 12.0, Targets(2.0, 0.1, 2.0))
    assert call_for([first, second, alone], first, "c").workflow_left_s is None, "its deadline is no share"


def test_a_workflow_that_was_late_costs_the_others_nothing():
    late = request("a", 10.0, Targets(2.0, 0.1, 2.0), workflow="v", workflow_left_s=-3.0)
    able = request("b", 11.0, Targets(2.0, 0.1, 2.0), workflow="w", workflow_left_s=6.0)
    assert call_for([late, able], late, "b").workflow_left_s == 7.0
    assert call_for([late, replace(late, arrival=11.0)], late, "b").workflow_left_s == -2.0
