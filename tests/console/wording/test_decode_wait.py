"""A request that was prefilled and never decoded: its page blames nobody who did their part, and says how it ended."""

from __future__ import annotations

import html
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.urls import reverse

from controller.models import ScalingSample
from controller.services.fleet.scaling_policies import scaling_policy_update
from controller.services.records.requests import records_write
from controller.wording.misses import why_missed
from controller.wording.request_steps import AGAIN, GIVEN_UP, PLACED, came_of_placing, step
from controller.wording.vocabulary import reason_in_words
from tests import factories
from tests.console.panels.test_timeline import row, tracks

PREFILLED = {"kind": "prefill", "reason": "prefilled", "at": 0.023, "figures": {"instance": "p-1", "tokens": 64}}
LEFT = {"kind": "place", "reason": "no_decode_instance", "at": 25.0, "figures": {"failures": 0, "waited_s": 24.977}}
NEVER_DECODED = {
    "instance": "p-1", "prefill_instance": "", "outcome": "failed", "attained": False, "ttft_met": False,
    "error_code": "no_capacity", "queue_s": 0.002, "ttft_s": None, "tpot_s": None, "e2e_s": 25.0, "output_tokens": 0,
    "token_times": [], "decisions": [PREFILLED, LEFT],
}  # fmt: skip


def given_up(**fields):
    return factories.record(**(NEVER_DECODED | fields))


def test_it_has_a_bar_for_its_prefill_and_one_for_its_wait():
    shown = tracks(row(**NEVER_DECODED))
    assert "Engine" not in shown
    assert shown["Prefill"].value_s == pytest.approx(0.021)
    assert shown["Prefill"].note == "on p-1, including its queue"
    assert shown["Prefill"].bars[0].kind == "", "it was in time"
    assert (shown["Wait for decode"].value_s, shown["Wait for decode"].note) == (pytest.approx(24.977), "timed out")
    assert [bar.kind for bar in shown["Wait for decode"].bars] == ["bad"]


def test_its_client_may_leave_while_it_waits():
    shown = tracks(row(**(NEVER_DECODED | {"outcome": "cancelled", "decisions": [PREFILLED]})))
    assert (shown["Wait for decode"].note, shown["Wait for decode"].bars[0].kind) == ("never placed", "queue")


def test_its_wait_begins_where_the_last_attempt_to_move_its_kv_ended():
    figures = {"instance": "d-1", "source": "p-1", "after_s": 0.5, "outcome": "failed"}
    lost = {"kind": "transfer", "reason": "transfer_failed", "at": 1.0, "figures": figures}
    shown = tracks(row(**(NEVER_DECODED | {"decisions": [PREFILLED, lost, LEFT]})))
    assert shown["KV transfer"].bars[0].kind == "bad"
    assert shown["Wait for decode"].value_s == pytest.approx(24.0)


def test_one_that_started_over_on_an_instance_that_does_both_has_no_wait():
    again = {"kind": "place", "reason": "no_decode_instance", "at": 3.0, "figures": {"instance": "p-1"}}
    both = {"instance": "both", "outcome": "ok", "queue_s": 3.1, "e2e_s": 4.0, "decisions": [PREFILLED, again]}
    shown = tracks(row(**(NEVER_DECODED | both)))
    assert "Wait for decode" not in shown
    assert shown["Engine"].value_s == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("figures", "what"),
    [
        ({"policy": "least_outstanding", "source": "p-1"}, PLACED),
        ({"instance": "p-1", "state": "waiting"}, AGAIN),
        ({"instance": "p-1", "error": "cut"}, AGAIN),
        ({"failures": 6, "waited_s": 2.0}, GIVEN_UP),
        ({}, PLACED),
    ],
)
def test_a_step_says_what_came_of_it(figures, what):
    recorded = {"kind": "place", "reason": "no_decode_instance", "at": 1.0, "figures": figures}
    assert came_of_placing(recorded) == what
    assert (step(recorded)["what"], step(recorded)["why"]) == (what, "no decode instance was up")


@pytest.mark.parametrize("code", ["no_decode_instance", "waiting_timeout", "other_model", "kv_lost", "decode_failed"])
def test_the_words_of_a_reason_do_not_say_what_came_of_it(code):
    assert "again" not in reason_in_words(code)
    assert "given up" not in reason_in_words(code)


def test_why_it_missed_names_both_stages():
    assert why_missed(row(**NEVER_DECODED)) == [
        "It was prefilled on p-1 23 ms after its arrival, and failed after 25.0 s without being decoded: "
        "no decode instance was up."
    ]


def test_its_page_speaks_of_the_fleet_when_it_was_given_up(operator, db):
    """A policy that was off by then has seen nothing of it, though what it had seen last is not half a minute old."""
    at = datetime.fromtimestamp(factories.NOON, tz=UTC)
    model = factories.served_model(name="demo")
    on, off = (factories.scaling_policy(model, role=role) for role in ("prefill", "decode"))
    type(on).objects.update(updated_at=at - timedelta(days=1), enabled=True)
    off = type(off).objects.get(pk=off.pk)
    type(off).objects.filter(pk=off.pk).update(enabled=False)
    for policy, seconds in ((on, 1), (on, 24), (off, 1)):
        ScalingSample.objects.create(
            policy=policy, at=at + timedelta(seconds=seconds), load=0.1, ready=seconds, starting=0, draining=0, mind=""
        )
    connection.ensure_connection()
    records_write(
        connection=connection.connection, records=[given_up(id="req-left", arrived_at=at.timestamp(), http_status=503)]
    )
    shown = html.unescape(operator.get(reverse("request", args=["req-left"])).content.decode())
    assert "24 ready, 0 starting" in shown, "what was seen last before it was given up"
    assert "The scaling policy of demo, decode, was disabled." in shown
    assert "1 ready" not in shown
    assert "Prefill instance p-1" in shown
    assert "Given up" in shown
    assert "failed: no decode instance was up (HTTP 503)" in " ".join(shown.split())
    scaling_policy_update(
        actor=factories.ACTOR, policy_id=off.pk, version=off.version, changes={"enabled": True, "min_instances": 1}
    )
    later = html.unescape(operator.get(reverse("request", args=["req-left"])).content.decode())
    assert "The scaling policy of demo, decode, was disabled." in later
