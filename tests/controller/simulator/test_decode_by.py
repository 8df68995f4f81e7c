"""What a decode step's time grows with: all of its sequences' tokens, or the longest of them alone."""

from dataclasses import replace

import pytest

from controller.core.types import LatencyCoefficients
from controller.simulator import Demand
from tests.controller.simulator.runs import PATIENT, SMALL, facts, simulate, some_demands

SLOW_TOKENS = replace(SMALL, latency=LatencyCoefficients(0.001, 1e-6, 0.0, 0.01, 1e-4, 0.002))
PAIR = [
    Demand(name, at, prompt, output, PATIENT, "c", max_tokens=output)
    for name, at, prompt, output in (("short", 0.0, 60, 40), ("long", 0.0005, 200, 12))
]


def gaps(decode_by):
    """Seconds between the tokens of the long one, which comes into a batch with the short one's second token."""
    engine = replace(SLOW_TOKENS, decode_by=decode_by)
    times = {r.id: list(r.token_times) for r in simulate(PAIR, "round_robin", instances=(engine,)).records}
    assert times["short"][1] == pytest.approx(times["long"][0] + 0.0005)  # since they came
    return [later - earlier for earlier, later in zip(times["long"], times["long"][1:], strict=False)]


def test_the_longest_sets_the_pace():
    assert gaps("longest") == pytest.approx([0.01 + 1e-4 * (200 + done) + 2 * 0.002 for done in range(1, 12)])


def test_or_the_sum_of_all():
    sums = [200 + done + 60 + done + 1 for done in range(1, 12)]
    assert gaps("sum") == pytest.approx([0.01 + 1e-4 * tokens + 2 * 0.002 for tokens in sums])


def test_leaps_change_nothing():
    demands, engine = some_demands(80, rate=60.0, seed=3), replace(SMALL, decode_by="longest")
    runs = [simulate(demands, instances=(engine, engine), leaps=leaps) for leaps in (True, False)]
    assert facts(runs[0]) == facts(runs[1])
