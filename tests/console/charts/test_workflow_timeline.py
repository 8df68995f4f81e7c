"""The shapes of a workflow's requests over time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from console.charts.workflow_timeline import LEAST, LEFT, RIGHT, WIDTH, DrawnRequest, followed, timeline

START = datetime(2026, 11, 28, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def step(
    name: str, arrived_s: float, ended_s: float, share_s: float | None = None, parents: list[str] | None = None
) -> DrawnRequest:
    return DrawnRequest(name, name, at(arrived_s), at(ended_s), share_s, False, parents, name)


def test_parents_that_the_client_named_are_drawn_in_place_of_what_times_tell() -> None:
    steps = [
        step("plan", 0, 1),
        step("a", 1, 3),
        step("b", 4, 5, parents=["plan"]),
        step("c", 6, 7, parents=["a", "b"]),
        step("d", 8, 9, parents=[]),
    ]
    found = timeline(steps, None)
    assert found is not None
    assert [(len(bar.follows), bar.inferred) for bar in found.bars] == [
        (0, False), (1, True), (1, False), (2, False), (0, False),
    ]  # fmt: skip
    plan, b = found.bars[0], found.bars[2]
    assert b.follows[0].startswith(f"M{round(plan.x + plan.width, 1)} ")
    assert found.inferred
    assert found.told


def test_bars_are_to_scale_and_the_deadline_is_in_the_chart() -> None:
    found = timeline([step("a", 0, 4, share_s=5), step("b", 4, 8), step("c", 8, 8)], at(10))
    assert found is not None
    first, second, third = found.bars
    assert (first.x, second.x) == (LEFT, LEFT + first.width)
    assert abs(first.width - second.width) < 0.2
    assert third.width == LEAST
    assert first.share_x is not None
    assert first.x + first.width < first.share_x < second.x + second.width
    assert found.due_x is not None
    assert second.x + second.width < found.due_x < WIDTH - RIGHT
    assert not found.due_beyond
    assert [seconds for _, seconds in found.ticks] == [0, 5, 10]


def test_a_deadline_far_away_does_not_squeeze_the_bars() -> None:
    found = timeline([step("a", 0, 1, share_s=200)], at(600))
    assert found is not None
    assert found.due_x is None
    assert found.due_beyond
    assert found.bars[0].share_x is None
    assert found.bars[0].width > (WIDTH - LEFT) / 2


def test_a_request_follows_what_ended_last_before_it() -> None:
    plan, left, right = step("plan", 0, 2), step("left", 2, 6), step("right", 2, 5)
    assert followed(left, [plan]) is plan
    assert followed(right, [plan, left]) is plan
    assert followed(step("merge", 6, 7), [plan, left, right]) is left
    assert followed(plan, []) is None
    found = timeline([plan, left, right], None)
    assert found is not None
    assert [bool(bar.follows) for bar in found.bars] == [False, True, True]


def test_sixty_requests_have_a_row_each() -> None:
    found = timeline([step(str(number), number, number + 1) for number in range(60)], None)
    assert found is not None
    rows = [bar.y for bar in found.bars]
    assert all(after - before > 12 for before, after in pairwise(rows))
    assert max(rows) < found.height
    assert len(found.ticks) <= 6


def test_without_requests_there_is_nothing_to_draw() -> None:
    assert timeline([], at(5)) is None
    alone = timeline([step("a", 0, 0)], at(0))
    assert alone is not None
    assert alone.bars[0].width == LEAST


def test_a_request_that_got_anothers_answer_has_a_line_from_it() -> None:
    first, second, alone = step("a", 0, 4), step("b", 1, 4), step("c", 1, 9)
    marked = [replace(second, answer_of="a", mark="shared"), replace(alone, answer_of="elsewhere", mark="shared")]
    found = timeline([first, *marked], None)
    assert found is not None
    a, b, c = found.bars
    assert b.shared.startswith("M")
    assert b.shared.endswith(f"V{b.y + found.bar / 2}")
    assert (a.shared, c.shared) == ("", "")
    assert found.shared
    assert b.mark_x > b.x + b.width
    assert c.mark_x < c.x, "no room behind the longest bar"
