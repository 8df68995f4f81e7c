"""What a receiver tells of when KV came."""

from __future__ import annotations

import pytest

from controller.core.kv_links import MOST_PAUSES, KvMoved, moved_from_json
from workers.engine.kv.progress import SHORTEST_PAUSE_S, Came, KvArrivals


class Clock:
    """Moments in turn, in seconds."""

    def __init__(self, *moments: float) -> None:
        self._moments = list(moments)

    def __call__(self) -> float:
        return self._moments.pop(0)


def came(*layers: tuple[float, float, int], end: float) -> Came:
    """Of layers that begin and end then, with so many bytes."""
    made = KvArrivals(Clock(*(at for begin, over, _ in layers for at in (begin, over)), end))
    for _, _, size in layers:
        made.layer()
        made.layer_came(size)
    return made.over()


def test_a_pause_is_told_with_what_had_come_before_it() -> None:
    found = came((2.0, 2.5, 100), (2.501, 3.0, 100), (5.0, 5.5, 300), end=6.5)
    assert found.span_s == 4.5, "from the first KV on"
    assert found.pauses == pytest.approx((3.5, 1.5, 0.4, 1.0, 0.0, 1.0)), "and the last layer was not the end of it"
    assert came((2.0, 2.5, 100), end=2.5) == (0.5, ())


def test_of_many_pauses_the_longest_are_told_in_their_order() -> None:
    layers = [(10.0 * number, 10.0 * number + (9.0 if number % 2 else 1.0), 1) for number in range(20)]
    pauses = came(*layers, end=199.0).pauses
    assert len(pauses) == 3 * MOST_PAUSES
    assert {round(one - other, 3) for one, other in zip(pauses[::3], pauses[1::3], strict=True)} == {9.0}
    assert list(pauses[::3]) == sorted(pauses[::3], reverse=True)


def test_nothing_that_came_and_short_gaps_are_no_pauses() -> None:
    assert came(end=3.0) == (0.0, ())
    gap = SHORTEST_PAUSE_S / 2
    assert came((0.0, 1.0, 1), (1.0 + gap, 2.0, 1), end=2.0 + gap).pauses == ()


def test_pauses_come_back_from_json() -> None:
    moved = KvMoved(bytes=1, seconds=2.0, pauses=(1.5, 0.5, 0.25, 0.25, 0.0, 1.0))
    assert moved_from_json({**moved._asdict(), "pauses": list(moved.pauses)}) == moved
    assert moved_from_json({"bytes": 1}) == KvMoved(bytes=1), "engines of an earlier release tell none"


@pytest.mark.parametrize(
    "pauses",
    [
        7,
        "ab",
        [None, 0, 0],
        [1.0, 0.5],
        [0.5, 1.0, 0.0],
        [2.0, 1.0, 0.5, 1.5, 0.5, 0.6],
        [2.0, 1.0, 0.5, 0.8, 0.5, 0.4],
        [1.0, -1.0, 0.5],
        [1.0, 0.0, 1.5],
        [float("nan"), 0.0, 0.5],
        [float("inf"), 0.0, 0.5],
        [0.0, 0.0, 0.0] * (MOST_PAUSES + 1),
    ],
)
def test_what_are_no_pauses_is_not_believed(pauses: object) -> None:
    assert moved_from_json({"bytes": 1, "pauses": pauses}) is None
