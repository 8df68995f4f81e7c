"""What the plan of deadlines is told of instances that are starting."""

from __future__ import annotations

from controller.dispatch.supply import LATE_S, SOON_S, supply_of

NOW = 100.0


def test_a_start_that_is_a_little_late_still_counts() -> None:
    """Its prediction is a median, and gateways hear of its end seconds later."""
    coming = supply_of((), NOW, (NOW + 7.0, NOW - 2.0, NOW + 0.1)).coming
    assert coming == (SOON_S, SOON_S, 7.0)


def test_one_that_is_much_later_does_not() -> None:
    assert supply_of((), NOW, (NOW - LATE_S,)).coming == ()
