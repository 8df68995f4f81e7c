"""The story of a request that was pruned."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from benchmarks.stories.pruned import PrunedRequest, PruningDecision, tell

AT = datetime(2026, 11, 29, 12, 55, 3, tzinfo=UTC)
PRUNE = {
    "kind": "prune", "reason": "others_in_time", "at": 0.4, "figures": {"instance": "engine-1", "behind_s": 0.62},
}  # fmt: skip
BACK = {"kind": "unprune", "reason": "room_again", "at": 1.2, "figures": {}}
DECISION = PruningDecision(
    42, AT, {"most_waiting": 31, "gateways": ["one", "two"], "seconds": 10.2, "pruned": 17, "drop_budget": 0.5,
             "requests": ["req-1", "req-2"]},
)  # fmt: skip


def request(name: str = "req-1", **fields: Any) -> PrunedRequest:
    made = PrunedRequest(name, AT, "engine-0", "ok", True, 1.9, 2.2, 4.0, [PRUNE, BACK])
    return made._replace(**fields)


def test_it_goes_from_the_overload_to_the_outcome() -> None:
    story = tell([request()], [DECISION])
    assert story[0].startswith("Decision 42 (pruning, 12:55:03 UTC): up to 31 requests waited at 2 gateways.")
    assert "Within 10.2 s 17 requests were pruned, with a drop budget of 50%" in story[0]
    assert "req-1. It arrived at 12:55:03 UTC, and its first token was due 4.0 s later" in story[1]
    assert "After 0.40 s it was pruned" in story[2]
    assert "engine-1 would be 0.62 s late" in story[2]
    assert story[3].startswith("After 1.20 s it got its place back")
    assert story[4] == "It waited 1.90 s in the queue, then engine-0 served it: first token after 2.20 s. It made it."
    assert story[5] == "Of the 1 requests that were pruned in this run, 1 met their targets."


def test_one_that_made_it_is_told_before_one_that_did_not() -> None:
    late = request("req-2", attained=False, ttft_s=5.5)
    assert "req-1" in tell([late, request()], [DECISION])[1]
    assert "first token after 5.50 s. It was late and counts as a miss." in tell([late], [DECISION])[4]


def test_one_that_was_never_served_says_so() -> None:
    story = tell([request(outcome="expired", attained=False, ttft_s=None, queue_s=None)], [DECISION])
    assert story[4] == "It was not served (expired). It counts as a miss."


def test_only_one_that_a_decision_names_is_told() -> None:
    assert tell([request("req-3")], [DECISION]) == tell([], []) == ["No request was pruned in this run."]
