"""What a client is told when the dispatcher serves it not: a sentence with units, for each reason there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from controller.core.decisions import Decision
from controller.core.snapshot import ComingConfig
from controller.dispatch.lifecycle import Cause
from controller.wording.measures import took
from controller.wording.refusals import ENDED, REFUSALS, refusal
from tests.api.openai.gateways import TestBed, completion
from tests.api.openai.test_coming import with_instances

DISPATCH = Path(__file__).parents[3] / "controller" / "dispatch"
# Of the client API: clients know them.
FIELDS = re.compile(r"\b(target_ttft|target_tbt|deadline|workflow_deadline|waiting_time)\b")
SHORTHAND = re.compile(r"[a-z]_[a-z]|e[-+]\d\d|\bNone\b|\bTrue\b|\bFalse\b")  # names of fields and raw figures

EXPIRED = {"waited_s": 5.002, "hopeless": True, "paused": False, "instances": 2, "outstanding": 30, "queued": 7}
CASES = [
    ("infeasible_alone", {"field": "target_ttft", "prefill_s": 0.00666, "ttft_s": 1e-06},
     "This request cannot meet its SLO even on an idle instance: prefill takes 6.7 ms, and its TTFT target is 0.001 "
     "ms. Raise target_ttft."),
    ("infeasible_alone", {"field": "deadline", "prefill_s": 0.25, "deadline_s": 0.1},
     "This request cannot meet its SLO even on an idle instance: prefill takes 250 ms, and its deadline is 100 ms. "
     "Raise deadline."),
    ("infeasible_alone", {"field": "deadline", "answer_s": 12.34, "deadline_s": 2.0},
     "This request cannot meet its SLO even on an idle instance: the whole answer takes 12.3 s, and its deadline is 2 "
     "s. Raise deadline."),
    ("infeasible_alone", {"field": "workflow_deadline", "answer_s": 12.34, "workflow_deadline_s": 2.0},
     "This request cannot meet its SLO even on an idle instance: the whole answer takes 12.3 s, and its workflow's "
     "deadline is 2 s. Raise workflow_deadline."),
    ("infeasible_alone", {"field": "target_tbt", "decode_step_s": 0.0073, "tpot_s": 0.001},
     "This request cannot meet its SLO even on an idle instance: one token takes 7.3 ms, and its TPOT target is 1 ms. "
     "Raise target_tbt."),
    ("unattainable_in_queue", {"waited_s": 0.5, "queued": 1200},
     "This request cannot meet its SLO behind the requests ahead of it: it waited 500 ms, and 1,200 other requests are "
     "waiting. Retry later or raise its targets."),
    ("unattainable_in_queue", {"waited_s": 0.5, "queued": 0},
     "This request cannot meet its SLO behind the requests ahead of it: it waited 500 ms. Retry later or raise its "
     "targets."),
    ("queue_full", {"queued": 1000, "bound": 1000},
     "The queue is full: 1,000 requests are waiting, which is its limit. Retry later."),
    ("no_instance", {}, "No instance of this model is up or starting. Retry later."),
    ("no_instance", {"waited_s": 3.21},
     "No instance of this model is up or starting any more; this request waited 3.21 s. Retry later."),
    ("starts_too_late", {"starts_in_s": 30.0, "waiting_s": 5},
     "No instance of this model is up yet: the next one is expected in 30 s, and this request can wait 5 s. Raise "
     "waiting_time or retry later."),
    ("engine_failed", {"attempts": 3, "error": "ConnectError('x')", "instance": "e1"},
     "The engine failed before the first token in each of 3 attempts. Retry the request."),
    ("engine_failed", {"attempts": 1, "error": "ConnectError('x')", "instance": "e1"},
     "The engine failed before the first token. Retry the request."),
    ("ended_engines", {"died": "e1, e2", "attempts": 2, "quarantine_s": 600.0},
     "This request was not served: 2 engines died while they computed it. The same request is refused for 600 s; "
     "change it before it is sent again."),
    ("ended_engines", {"died": "e1, e2", "attempts": 2},
     "This request was not served: 2 engines died while they computed it. Change it before it is sent again."),
    ("quarantined", {"died": "e1, e2", "quarantine_s": 12.5},
     "This request ended engines when it was sent before, so it is refused for 12.5 s. Change it before a retry."),
    ("waiting_time", EXPIRED,
     "This request was not dispatched within its waiting time: it waited 5 s, and all 2 instances were busy. Raise "
     "waiting_time or retry later."),
    ("waiting_time", {**EXPIRED, "instances": 1},
     "This request was not dispatched within its waiting time: it waited 5 s, and the only instance was busy. Raise "
     "waiting_time or retry later."),
    ("waiting_time", {**EXPIRED, "instances": 0, "waited_s": 0.0},
     "This request was not dispatched within its waiting time: it waited 0 ms, and no instance accepted requests. "
     "Raise waiting_time or retry later."),
    ("waiting_time", {**EXPIRED, "instances": 0, "instance_starting": True},
     "This request was not dispatched within its waiting time: it waited 5 s, and an instance was still starting. "
     "Raise waiting_time or retry later."),
    ("waiting_time", {**EXPIRED, "paused": True},
     "This request was not dispatched within its waiting time: it waited 5 s, and an operator had paused it. Raise "
     "waiting_time or retry later."),
    ("no_time_to_retry", {"attempts": 1, "error": "ConnectError('x')", "instance": "e1"},
     "The engine failed before the first token, and too little waiting time was left for another attempt. Retry the "
     "request or raise waiting_time."),
]  # fmt: skip


def decision(reason: str, figures: dict[str, Any]) -> Decision:
    return Decision("refuse", reason, "req-1", 0.0, figures)


@pytest.mark.parametrize(("reason", "figures", "said"), CASES)
def test_each_reason_is_a_sentence(reason: str, figures: dict[str, Any], said: str) -> None:
    assert refusal(decision(reason, figures)) == said
    assert not SHORTHAND.search(FIELDS.sub("", said))


def test_every_reason_that_the_dispatcher_refuses_for_has_its_sentence() -> None:
    """Read from the code, so that a new reason cannot reach clients as a name."""
    found = set()
    for node in (node for path in sorted(DISPATCH.rglob("*.py")) for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            values = [each.value for each in node.args if isinstance(each, ast.Constant)]
            if node.func.id == "refuse" or (node.func.id == "Decision" and values[:1] == ["expire"]):
                found.add(values[1])
    assert found == set(REFUSALS)


def test_a_reason_of_another_dispatcher_or_without_its_figures_is_said_all_the_same() -> None:
    assert refusal(decision("moon_is_full", {"a_b": 1})) == "This request was not served: moon is full."
    assert refusal(decision("infeasible_alone", {})) == "This request was not served: infeasible alone."


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0 ms"), (1e-6, "0.001 ms"), (0.00666, "6.7 ms"), (0.0999, "100 ms"), (0.9996, "1 s"), (1.5, "1.5 s"),
     (59.96, "60 s"), (3600.0, "3,600 s"), (2e-9, "less than 0.001 ms")],
)  # fmt: skip
def test_durations_have_a_unit_and_no_exponent(seconds: float, said: str) -> None:
    assert took(seconds) == said


async def test_a_client_that_asks_for_too_much_is_told_in_a_sentence_and_the_record_keeps_the_figures() -> None:
    async with TestBed() as bed:
        answer = await bed.ask(completion(target_ttft=0.000001))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (429, "slo_infeasible", "target_ttft")
        said = answer.error["message"]
        assert said.startswith("This request cannot meet its SLO even on an idle instance: prefill takes "), said
        assert said.endswith(" ms, and its TTFT target is 0.001 ms. Raise target_ttft."), said
        (record,) = bed.sink.records
        figures = record.decisions[-1]["figures"]
        assert figures["ttft_s"] == 1e-06
        assert figures["field"] == "target_ttft"


async def test_a_client_that_expired_is_told_in_a_sentence() -> None:
    async with TestBed(with_instances(coming=(ComingConfig("e1", "demo"),))) as bed:
        answer = await bed.ask(completion(waiting_time=0.05))
        assert answer.status == 504
        said = answer.error["message"]
        assert said.startswith("This request was not dispatched within its waiting time: it waited "), said
        assert said.endswith("ms, and an instance was still starting. Raise waiting_time or retry later."), said


def test_ends_without_a_decision_are_told_in_words() -> None:
    explained = {Cause.REFUSED, Cause.EXPIRED}  # by their decision
    untold = {Cause.ANSWERED, Cause.HUNG_UP, Cause.REJECTED, Cause.CUT_OFF}  # by no message of ours
    assert {*ENDED} == {*Cause} - explained - untold
