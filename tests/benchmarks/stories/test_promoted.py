"""The story of a transfer that was promoted in time."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.stories.promoted import NONE, RecordedFirst, tell
from controller.core.messages import HostFlow

FIRST = {"req-1": RecordedFirst(5.0, 8.0), "req-2": RecordedFirst(7.5, 8.0)}


def flow(request: str = "req-1", **fields: Any) -> HostFlow:
    return {
        "id": f"f-{request}", "request": request, "stage": 3, "port": "out", "to": "10.0.0.2", "size_bytes": 2.5e6,
        "left_bytes": 0.0, "due_in_s": 3.25, "go": False, "waiting": False, "rate": 0.0, "age_s": 2.5, "held_s": 1.5,
        "levels": [(0.0, 7), (0.5, 5), (1.75, 2)], "end": "ended", "ended_s": 4.0, **fields,
    }  # type: ignore[typeddict-item]  # fmt: skip


def test_it_has_the_levels_with_their_times_the_deadline_and_the_end() -> None:
    story = tell([flow()], FIRST)
    assert story[0] == "Request req-1 was due to have its first token 8.0 s after its arrival."
    assert story[1] == "The transfer of its KV, 2.50 MB, was submitted with 5.75 s left, at level 7."
    assert story[2] == "As its deadline came near it was promoted to level 5 after 0.50 s, to level 2 after 1.75 s."
    assert story[3] == "It was held for 1.50 s, and was complete after 2.50 s, 3.25 s early."
    assert "5.00 s after the request's arrival, which was in time" in story[4]


def test_it_is_that_of_the_transfer_which_was_closest_to_its_deadline() -> None:
    story = tell([flow(), flow("req-2", due_in_s=0.125)], FIRST)
    assert "req-2" in story[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"levels": [(0.0, 7)]}, {"levels": []}, {"due_in_s": -0.1}, {"due_in_s": None}, {"end": "lost"}, {"end": ""},
        {"stage": 4}, {"request": "not-recorded"},
    ],
)  # fmt: skip
def test_others_have_none(fields: dict[str, Any]) -> None:
    assert tell([flow(**fields)], FIRST) == [NONE]


def test_a_first_token_that_came_late_is_none_in_time() -> None:
    assert tell([flow()], {"req-1": RecordedFirst(8.5, 8.0)}) == [NONE]
