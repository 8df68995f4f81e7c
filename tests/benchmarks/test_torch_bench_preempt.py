"""The measurement itself, on operators of known duration (worked example F5: 2, 8, 1, 4, 3 ms)."""

import time

import pytest

from benchmarks.bench_preempt import (
    BLOCK_SIZE,
    BenchPrompt,
    Measurement,
    Piece,
    Pieces,
    TimedExecutor,
    pieces,
    ratios,
    summary,
    throughput_cost_pct,
)
from tests.workers.engine.torch.bench import VOCABULARY, folder, program
from workers.engine.torch.task import Boundary

pytestmark = [pytest.mark.torch, pytest.mark.long(18)]
F5_MS = (2.0, 8.0, 1.0, 4.0, 3.0)


def sleeping(seconds):
    def run(p):
        time.sleep(seconds)
        p.logits = p.logits if len(p.logits) else p.hidden[:1]

    return run


@pytest.fixture
def asleep():
    """A program of two layers that sleep F5's durations, and an output layer of no length."""
    found = program(folder(), 16, BLOCK_SIZE)
    durations = [*F5_MS, *F5_MS, 0.0]
    found.stages = [
        stage._replace(operator=sleeping(ms / 1e3)) for stage, ms in zip(found.stages, durations, strict=True)
    ]
    return found


def test_f5_is_what_the_pieces_predict():
    operator = Pieces(pieces(F5_MS, [True] * 5, lead=0))
    layer = Pieces(pieces(F5_MS, [False] * 4 + [True], lead=0))
    assert operator.mean_wait == pytest.approx(2.6111, abs=1e-4)
    assert layer.mean_wait == pytest.approx(9.0)
    assert Pieces([Piece(sum(F5_MS))]).mean_wait == 9.0
    assert layer.wait_quantile(0.5) == pytest.approx(9.0)
    assert layer.mean_wait / operator.mean_wait == pytest.approx(3.4468, abs=2e-4)


def test_what_a_device_has_been_given_already_is_waited_for_too():
    ends = [False] * 4 + [True]
    assert pieces(F5_MS, [True] * 5, lead=1) == [(2.0, 8.0), (8.0, 1.0), (1.0, 4.0), (4.0, 3.0), (3.0, 0.0)]
    two_layers = pieces([*F5_MS, *F5_MS], [*ends, *ends], lead=1)
    assert two_layers[3:5] == [(4.0, 3.0), (3.0, 18.0)]  # in the last one the next layer has begun
    assert Pieces(pieces((2.0, 4.0), [True, True], lead=1)).mean_wait == (2 * (1 + 4) + 4 * 2) / 6


def test_quantiles_of_the_wait():
    def quantile(*seconds, share):
        return Pieces([Piece(each) for each in seconds]).wait_quantile(share)

    assert quantile(10.0, share=0.5) == pytest.approx(5.0)
    assert quantile(2.0, 2.0, share=0.99) == pytest.approx(1.98)
    assert quantile(1.0, 3.0, share=0.75) == pytest.approx(2.0)  # 1/4 below 1 waits at most 1
    assert Pieces([Piece(2.0, 3.0)]).wait_quantile(0.5) == pytest.approx(4.0)


def test_known_operators_are_measured_as_predicted(asleep):
    prompt = BenchPrompt(64, 1, VOCABULARY)
    measurement = Measurement(asleep, prompt, 32, 1)
    measurement.run(60)
    found = {kind: summary(measurement.blocked[kind], Pieces(measurement.pieces[kind])) for kind in measurement.pieces}
    assert measurement.operator_ms()["attn"] == pytest.approx(8.0, rel=0.2)
    assert found["operator"]["p50"] == pytest.approx(2.2, rel=0.6)  # other work on the machine delays answers
    assert found["layer"]["p50"] == pytest.approx(9.0, rel=0.4)
    assert 2.0 < ratios(found)["layer"]["measured"] < 6.0


def test_cost_is_the_median_of_pairs_in_alternating_order(asleep, monkeypatch):
    checked_s = iter([1.02, 1.01, 1.5, 1.03, 0.9, 1.01])
    measured, live = [], []

    class OneAtATime(TimedExecutor):
        def __init__(self, program, boundary):
            assert not live, "two devices at a time would each keep an arena of memory of their own"
            live.append(self)
            self.boundary, self.prefills = boundary, 0
            super().__init__(program, boundary)
            close = self.executor.close
            self.executor.close = lambda: (live.remove(self), close())

        def prefill_s(self, steps):
            self.prefills += 1
            if self.prefills == 1:
                return 99.0  # warms up
            measured.append(self.boundary)
            return next(checked_s) if self.boundary is Boundary.OPERATOR else 1.0

    monkeypatch.setattr("benchmarks.bench_preempt.TimedExecutor", OneAtATime)
    cost, pairs = throughput_cost_pct(asleep, BenchPrompt(64, 1, VOCABULARY), 6)
    assert pairs == [1.02, 1.01, 1.5, 1.03, 0.9, 1.01]
    assert cost == pytest.approx(1.5)
    pair = [None, Boundary.OPERATOR]
    assert measured == [*pair, *pair[::-1]] * 3
    assert live == []
