"""What an ended request leaves behind: its goodput and the cause of its miss."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from api.openai.in_flight import InFlightRequest
from api.openai.ledger import Instruments, Ledger
from api.openai.state.refusal_groups import SINGLE, RefusalGroups
from api.openai.tenants import Quotas
from controller.core.decisions import Decision
from controller.core.types import Outcome, Request, Targets
from controller.slo.attainment import deadline_goodput
from tests import factories
from tests.api.openai.gateways import ListSink
from workers.backends.base import Usage


async def _nowhere(message: Any) -> None:
    return None


def _flight(**targets: Any) -> InFlightRequest:
    request = Request("r1", 100.0, Targets(2.0, 0.1, **targets), 500, 4, "demo", "acme", "chat")
    return InFlightRequest(request, b"{", _nowhere, time.time(), chat=False, streamed=True, keep_usage=False)


def _ledger() -> tuple[Ledger, ListSink]:
    sink = ListSink()
    return Ledger(sink, RefusalGroups(sink), Quotas(), Instruments()), sink


def _cause(in_flight: InFlightRequest, outcome: Outcome, code: str) -> str:
    ledger, _ = _ledger()
    ledger.note(in_flight, outcome, 105.0, code=code)
    (row,) = ledger.windows.view(105.0, {}, {})
    return row["miss_reason"]


async def test_only_requests_that_no_engine_was_asked_for_are_recorded_together() -> None:
    ledger, sink = _ledger()
    for attempts, outcome in ((0, Outcome.REFUSED), (1, Outcome.REFUSED), (1, Outcome.FAILED)):
        for _ in range(SINGLE + 5):
            in_flight = _flight()
            in_flight.sends = attempts
            ledger.note(in_flight, outcome, 105.0)
    assert Counter((record.attempts, record.outcome) for record in sink.records) == {
        (0, Outcome.REFUSED): SINGLE,
        (1, Outcome.REFUSED): SINGLE + 5,
        (1, Outcome.FAILED): SINGLE + 5,
    }


def test_a_deadlines_goodput_counts_the_prompt_as_the_engine_did() -> None:
    ledger, sink = _ledger()
    in_flight = _flight(deadline_s=5.0)
    in_flight.delivered(2, 101.0)
    in_flight.usage = Usage(prompt_tokens=20, completion_tokens=2)
    ledger.note(in_flight, Outcome.OK, 102.0)
    assert sink.records[0].goodput_tokens == deadline_goodput(2.0, 5.0, 20, 2)
    assert sink.records[0].goodput_tokens != deadline_goodput(2.0, 5.0, 500, 2)


@pytest.mark.parametrize(
    ("told", "answered"),
    [(12, 5), (13, 5), (25, 10), (40, 65 / 4)],
    ids=["all sent", "end of reasoning", "two", "some"],
)
def test_the_token_that_ends_the_reasoning_is_none_of_the_answers(told: int, answered: float) -> None:
    """Seven events of reasoning and five of the answer, a second apart. An engine may count the token between them,
    and several in an event; it says only how many there were."""
    ledger, sink = _ledger()
    in_flight = _flight(thinking_s=60.0)
    for at in range(12):
        in_flight.delivered(1, 101.0 + at, min(at + 1, 7))
    in_flight.output_tokens = told
    ledger.note(in_flight, Outcome.OK, 113.0)
    assert sink.records[0].tpot_s == pytest.approx(4.0 / (answered - 1))


@pytest.mark.parametrize(
    ("kind", "reason", "figures", "code", "cause"),
    [
        ("refuse", "queue_full", {}, "rate_limit_exceeded", "queue_full"),
        ("refuse", "no_instance", {}, "no_capacity", "no_instance"),
        ("expire", "waiting_time", {"instances": 2}, "waiting_time_exceeded", "waiting_time"),
        ("expire", "waiting_time", {"hopeless": True, "instances": 2}, "waiting_time_exceeded", "expired_hopeless"),
        ("expire", "waiting_time", {"hopeless": True, "pruned": True}, "waiting_time_exceeded", "expired_pruned"),
        ("expire", "waiting_time", {"paused": True, "instances": 0}, "waiting_time_exceeded", "expired_paused"),
        ("expire", "waiting_time", {"instances": 0}, "waiting_time_exceeded", "expired_without_instance"),
        ("expire", "no_time_to_retry", {}, "waiting_time_exceeded", "no_time_to_retry"),
        ("cancel", "cancelled_by_operator", {}, "cancelled", "cancelled_by_operator"),
        ("dispatch", "fits_budget", {}, "internal_error", "internal_error"),
    ],
)
async def test_the_cause_says_what_the_decision_says(
    kind: str, reason: str, figures: dict[str, Any], code: str, cause: str
) -> None:
    in_flight = _flight()
    in_flight.note(Decision(kind, reason, "r1", 104.0, figures))
    assert _cause(in_flight, Outcome.REFUSED, code) == cause


async def test_without_a_decision_the_code_is_the_cause() -> None:
    assert _cause(_flight(), Outcome.REFUSED, "rate_limit_exceeded") == "rate_limit_exceeded"


def test_prometheus_counts_goodput_by_type_and_leaves_out_workflows() -> None:
    instruments = Instruments()
    miss = {"attained": False, "goodput_tokens": 0}
    for record in (
        factories.record(goodput_tokens=18), factories.record(**miss), factories.record(outcome="cancelled", **miss),
        factories.record(target_deadline_s=9.0, goodput_tokens=120), factories.record(workflow="w"),
        factories.record(outcome="refused", stands_for=40, **miss),
        factories.record(slo_class="", decisions=[{"kind": "slo", "reason": "defaults"}]),
    ):  # fmt: skip
        instruments.ended(record)

    def value(name: str, kind: str, slo_class: str = "interactive") -> float | None:
        labels = {"tenant": "acme", "slo_class": slo_class, "type": kind}
        return instruments.registry.get_sample_value(f"slackline_goodput_{name}_total", labels)

    kinds = (("latency", "interactive"), ("deadline", "interactive"), ("best_effort", ""))
    counted = {
        kind: [value(name, kind, slo_class) for name in ("finished", "requests", "tokens")] for kind, slo_class in kinds
    }
    assert counted == {"latency": [42, 1, 18], "deadline": [1, 1, 120], "best_effort": [1, 1, 20]}
    assert value("finished", "compound") is None
