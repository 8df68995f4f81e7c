"""Why a request missed, in words: from its record alone, and never more than the record says."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from controller.models import RequestRecord
from controller.wording.misses import why_missed
from tests import factories


def row(**given):
    return RequestRecord(**asdict(factories.record(**given)))


def miss(outcome="ok", step=None, **fields):
    given = {"attained": False, "outcome": outcome, "decisions": [step] if step else [], **fields}
    return why_missed(row(**given))


def step(kind, reason, rejected=None, **figures):
    return {"kind": kind, "reason": reason, "at": 1.0, "figures": figures, "rejected": rejected or {}}


EXPIRED = {"waited_s": 5.0, "hopeless": False, "paused": False, "instances": 3, "outstanding": 36, "queued": 12}


@pytest.mark.parametrize(
    ("outcome", "decided", "said"),
    [
        ("expired", step("expire", "waiting_time", **EXPIRED),
         ["It timed out after 5.00 s in the queue: all 3 available instances were busy, with 36 requests, and 12 "
          "more were waiting in the queue."]),
        ("expired", step("expire", "waiting_time", {"e-1": "1 outstanding, 0 tokens waiting"},
                         **(EXPIRED | {"instances": 1, "outstanding": 1, "queued": 0, "hopeless": True})),
         ["It timed out after 5.00 s in the queue: the only available instance was busy, with 1 request.",
          "Its first token was due after 1.00 s; once that had passed, requests that could still meet their "
          "targets went first."]),
        ("expired", step("expire", "waiting_time", {"e-1": "1 outstanding", "e-2": "2 outstanding"},
                         **(EXPIRED | {"instances": 2, "outstanding": 3, "queued": 0})),
         ["It timed out after 5.00 s in the queue: all 2 available instances were busy, with 3 requests.",
          "e-1 had 1 outstanding; e-2 had 2 outstanding."]),
        ("expired", step("expire", "waiting_time", waited_s=5.0, hopeless=False, paused=False, instances=3),
         ["It timed out after 5.00 s in the queue: all 3 available instances were busy."]),
        ("expired", step("expire", "waiting_time", **(EXPIRED | {"instances": 0})),
         ["It timed out after 5.00 s in the queue: no instance of demo accepted requests."]),
        ("expired", step("expire", "waiting_time", **(EXPIRED | {"instances": 0, "instance_starting": True})),
         ["It timed out after 5.00 s in the queue: no instance of demo was up, and the one that was starting was not "
          "ready by then."]),
        ("expired", step("expire", "waiting_time", **(EXPIRED | {"paused": True})),
         ["It timed out after 5.00 s in the queue: an operator had paused it."]),
        ("expired", step("expire", "no_time_to_retry", instance="e-1", error="killed", attempts=1),
         ["e-1 failed (killed), and too little of its waiting time was left for a retry on another instance."]),
        ("refused", step("refuse", "no_instance"),
         ["It was refused immediately: no instance of demo was up or starting."]),
        ("refused", step("refuse", "no_instance", waited_s=2.0),
         ["It was refused after 2.00 s in the queue: no instance of demo was up, and none was starting any more."]),
        ("refused", step("refuse", "starts_too_late", starts_in_s=30.0, waiting_s=5.0),
         ["It was refused: no instance was up, the next one was expected in 30.0 s, and its waiting time was 5.00 s."]),
        ("refused", step("refuse", "queue_full", queued=1000, bound=1000),
         ["It was refused: 1,000 requests were waiting, the limit of the gateway's queue."]),
        ("refused", step("refuse", "unattainable_in_queue", waited_s=0.5, queued=40),
         ["It was refused after 500 ms in the queue: it would have missed its targets behind the 40 ahead of it."]),
        ("refused", step("refuse", "infeasible_alone", field="target_tbt", decode_step_s=0.02, tpot_s=0.005),
         ["It was refused: even on an idle instance one token was predicted to take 20 ms, and its TPOT target was "
          "5.0 ms."]),
        ("refused", step("refuse", "infeasible_alone", field="deadline", prefill_s=2.0, deadline_s=1.0),
         ["It was refused: even on an idle instance prefill was predicted to take 2.00 s, and its deadline was 1.00 "
          "s."]),
        ("refused", step("refuse", "infeasible_alone", field="workflow_deadline", prefill_s=2.0,
                         workflow_deadline_s=1.0),
         ["It was refused: even on an idle instance prefill was predicted to take 2.00 s, and its workflow's deadline "
          "was 1.00 s."]),
        ("refused", step("cancel", "workflow_cancelled_by_operator"), ["An operator cancelled its workflow."]),
        ("refused", step("cancel", "cancelled_by_operator", actor="olga", command="c-1"),
         ["olga cancelled it in the queue."]),
        ("failed", step("refuse", "engine_failed", attempts=3, instance="e-2", error="no answer"),
         ["It failed after 3 attempts; the last one, on e-2, ended with: no answer."]),
    ],
)  # fmt: skip
def test_one_that_was_not_served_says_what_stood_in_its_way(outcome, decided, said):
    assert miss(outcome, decided, queue_s=None, ttft_s=None) == said


@pytest.mark.parametrize("figures", [{}, {"waited_s": "?"}, {"waited_s": 1.0}])
def test_figures_that_an_older_gateway_did_not_record_are_not_made_up(figures):
    assert miss("expired", step("expire", "waiting_time", **figures)) == ["It was not served: timed out in the queue."]


def test_without_a_decision_the_code_speaks():
    assert miss("refused", error_code="rate_limit_exceeded") == [
        "It was not served: refused: the tenant's quota was exceeded."
    ]


def test_one_that_was_late_says_where_the_time_went():
    sent = step("dispatch", "fits_budget", outstanding=11, queued=40)
    said = miss(step=sent, ttft_met=False, ttft_s=3.0, queue_s=2.6)
    assert said == [
        "Its first token arrived after 3.00 s, 2.00 s late: 2.60 s in the gateway's queue, 400 ms on engine-1.",
        "When it was dispatched, engine-1 had 11 other requests, and 40 more were waiting.",
    ]
    one = step("dispatch", "fits_budget", outstanding=11, queued=1)
    assert miss(step=one, ttft_met=False, ttft_s=3.0, queue_s=2.6)[1].endswith("and 1 more was waiting.")
    lost = step("dispatch", "hopeless_spare_budget", outstanding=1, queued=0)
    assert "too late to meet its targets by then" in miss(step=lost, ttft_met=False, ttft_s=3.0, queue_s=2.6)[1]
    late = step("dispatch", "late_everywhere", outstanding=1, queued=0)
    assert "No instance could meet its targets by then" in miss(step=late, ttft_met=False, ttft_s=3.0, queue_s=2.6)[1]


@pytest.mark.parametrize(
    ("began", "said"),
    [
        (2.5, "60 ms of prefill on p-1, 2.43 s of waiting for a decode instance, 400 ms of KV transfer to d-1, 100 ms "
              "until its first decode step on d-1 ended. The wait for a decode instance took the longest."),
        (0.07, "60 ms of prefill on p-1, 2.83 s of KV transfer to d-1, 100 ms until its first decode step on d-1 "
               "ended. The KV transfer took the longest."),
    ],
)  # fmt: skip
def test_one_that_was_late_on_two_instances_names_the_stage_that_took_the_time(began, said):
    steps = [
        {"kind": "prefill", "at": 0.07, "figures": {"instance": "p-1"}},
        {"kind": "transfer", "at": 2.9, "figures": {"instance": "d-1", "after_s": 2.9 - began}},
    ]
    where = {"prefill_instance": "p-1", "instance": "d-1"}
    (first,) = miss(ttft_met=False, ttft_s=3.0, queue_s=0.01, decisions=steps, **where)
    assert first == f"Its first token arrived after 3.00 s, 2.00 s late: 10 ms in the gateway's queue, {said}"


def test_each_target_that_was_missed_is_named():
    said = miss(tpot_met=False, tpot_s=0.2, deadline_met=False, target_deadline_s=1.0, e2e_s=4.0)
    assert said == [
        "Its tokens took 200 ms each on engine-1; its TPOT target was 100 ms.",
        "Its answer finished after 4.00 s; its deadline was 1.00 s.",
    ]


def test_one_that_was_not_streamed_is_judged_by_its_whole_answer():
    (said,) = miss(streamed=False, ttft_met=False, ttft_s=None, tpot_s=None, e2e_s=9.0, queue_s=1.0, output_tokens=11)
    assert said == (
        "Its answer was not streamed and took 9.00 s, of which 1.00 s in the gateway's queue; its TTFT and TPOT "
        "targets allow 2.00 s for 11 tokens."
    )


def test_nothing_is_said_of_what_attained_or_left():
    assert why_missed(row()) == []
    assert miss("cancelled") == []
    cancelled = miss("cut", output_tokens=1, error_code="cancelled")
    assert cancelled == ["An operator cancelled its workflow during the answer, after 1 token."]
    assert miss("cut", output_tokens=1) == ["Its instance engine-1 failed during the answer, after 1 token."]
