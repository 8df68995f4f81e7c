"""The order of arrivals does not hang on how far apart two clocks are read."""

from __future__ import annotations

from itertools import cycle

import pytest

from workers.vllm_plugin.arrivals import MOST_IN_FRONT_S, Arrivals


class Clocks:
    """Two clocks; each reading of the wall clock is off by the next of `errors`."""

    def __init__(self, *errors: float) -> None:
        self.now, self.apart = 1000.0, 1e9
        self._errors = cycle(errors or (0.0,))
        self.arrivals = Arrivals(lambda: self.now, lambda: self.now + self.apart + next(self._errors))

    def at(self, ago_s: float) -> float:
        """When a request that arrived `ago_s` ago is said to have arrived, in seconds before now."""
        return self.now - self.arrivals.at(self.now + self.apart - ago_s)


def test_requests_microseconds_apart_keep_their_order() -> None:
    clocks = Clocks(0.0, 80e-6, -60e-6, 40e-6)
    found = []
    for _ in range(20):
        found.append(clocks.now - clocks.at(50e-6))
        clocks.now += 10e-6
    assert found == sorted(found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("step_s", [5.0, -5.0])
def test_a_wall_clock_that_is_set_is_followed(step_s: float) -> None:
    clocks = Clocks()
    assert clocks.at(0.25) == pytest.approx(0.25, abs=1e-5)
    clocks.apart += step_s
    assert clocks.at(0.25) == pytest.approx(0.25, abs=1e-5)


def test_a_process_that_is_kept_waiting_between_two_readings_does_not_set_the_clock() -> None:
    clocks = Clocks()
    clocks.at(0.0)
    waits = iter([0.0, 0.5])

    def monotonic() -> float:
        clocks.now += next(waits, 0.0)
        return clocks.now

    clocks.arrivals._monotonic = monotonic
    wall = clocks.now + clocks.apart
    assert clocks.arrivals.at(wall) == pytest.approx(1000.0, abs=1e-5)


def test_another_machines_clock_is_held_to_what_a_front_end_can_take() -> None:
    clocks = Clocks()
    assert clocks.at(7200.0) == MOST_IN_FRONT_S
    assert clocks.at(-7200.0) == 0.0
