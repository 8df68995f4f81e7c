"""The emulated device's pace, on a clock the test moves."""

from collections.abc import Callable

import pytest

from controller.core.steps import Added, Emit, Seq, Start, Step, StepDone, Swaps
from controller.core.types import LatencyCoefficients
from controller.engine import EngineConfig, EngineScheduler
from controller.policies.batching import BATCHINGS
from workers.engine.emulated import EmulatedExecutor
from workers.engine.emulated_swap import EmulatedSwap, emulated_costs
from workers.engine.profiles import Profile
from workers.engine.text.pseudo_text import natural_length, token_at
from workers.engine.text.tokenizer import EOS

STEP = 0.010
PROFILE = Profile("test", "m", LatencyCoefficients(STEP, 0, 0, STEP, 0, 0), 1000)


class FakeTimer:
    """`late` is how long after its due time a callback runs."""

    def __init__(self) -> None:
        self.time = 100.0
        self.late = 0.0
        self.pending: tuple[float, Callable[[], None]] | None = None

    def now(self) -> float:
        return self.time

    def call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        assert self.pending is None
        self.pending = (when, callback)
        return self.cancel

    def cancel(self) -> None:
        self.pending = None

    def fire(self) -> None:
        assert self.pending is not None
        (when, callback), self.pending = self.pending, None
        self.time = max(self.time, when + self.late)
        callback()


class Bench:
    """Scheduler and executor wired as the live engine wires them."""

    def __init__(self) -> None:
        self.timer = FakeTimer()
        config = EngineConfig(kv_blocks=64, max_model_len=1000, max_num_seqs=4)
        self.scheduler = EngineScheduler(config, BATCHINGS["chunked_prefill"]())
        self.executor = EmulatedExecutor(PROFILE, self.timer, self.handle)
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    def handle(self, event: Added | StepDone) -> None:
        if isinstance(event, StepDone):
            self.seconds.append(event.seconds)
        for action in self.scheduler.handle([event], self.timer.now()).actions:
            if isinstance(action, Emit):
                self.tokens.append(action.token)
            elif isinstance(action, Start):
                self.executor.start(action.step)

    def add(self, **fields: object) -> Seq:
        seq = Seq("s", self.timer.now(), 4, **{"max_tokens": 500, "ignore_eos": True, "seed": 5, **fields})
        self.handle(Added(seq))
        return seq

    def fire(self, times: int) -> None:
        for _ in range(times):
            self.timer.fire()


def test_start_never_runs_the_step_itself():
    bench = Bench()
    bench.add()
    assert bench.tokens == []
    bench.fire(1)
    assert bench.tokens == [token_at(5, 0)]
    assert bench.seconds == [STEP]


def test_timer_jitter_does_not_add_up():
    bench = Bench()
    bench.timer.late = 0.001
    bench.add()
    bench.fire(200)
    assert bench.timer.time == pytest.approx(100 + 200 * STEP + 0.001)


def test_a_stall_is_made_good_by_one_step_at_most():
    bench = Bench()
    bench.add()
    bench.fire(1)
    bench.timer.late = 0.5
    bench.fire(1)
    stalled = bench.timer.time
    bench.timer.late = 0.0
    bench.fire(11)
    assert bench.timer.time == pytest.approx(stalled + 10 * STEP)


def test_an_idle_device_does_not_bank_time():
    bench = Bench()
    bench.add(max_tokens=1)
    bench.fire(1)
    bench.timer.time += 5.0
    bench.add(max_tokens=1)
    bench.fire(1)
    assert bench.timer.time == pytest.approx(105 + 2 * STEP)


def test_the_model_ends_at_its_natural_length():
    bench = Bench()
    bench.add(ignore_eos=False)
    while bench.timer.pending:
        bench.fire(1)
    assert len(bench.tokens) == natural_length(5)
    assert bench.tokens[-1] == EOS
    assert EOS not in bench.tokens[:-1]


def test_min_tokens_puts_the_end_off():
    bench = Bench()
    least = natural_length(5) + 20
    bench.add(ignore_eos=False, min_tokens=least)
    while bench.timer.pending:
        bench.fire(1)
    assert len(bench.tokens) == least + 1


def test_closing_drops_the_running_step():
    bench = Bench()
    bench.add()
    bench.executor.close()
    assert bench.timer.pending is None


def test_two_steps_at_a_time_are_an_error():
    bench = Bench()
    bench.add()
    with pytest.raises(RuntimeError, match="a step is running"):
        bench.executor.start(bench.scheduler._step)


def test_an_emulated_copy_of_kv_takes_its_time():
    """Which the scheduler learns: its estimates are those of the emulated link."""
    swap = EmulatedSwap(1000, 1e6)  # a block takes a millisecond
    timer, found = FakeTimer(), []
    executor = EmulatedExecutor(PROFILE, timer, found.append, swap=swap)
    seq = Seq("s", 0.0, 4, 10, output_tokens=1, computed=4)
    step = Step(1, (), (seq,), 5)
    executor.start(step)
    timer.fire()
    executor.start(step._replace(swaps=Swaps(((1, 1), (2, 2)), ((3, 3),))))
    timer.fire()
    plain, copied = found
    assert (plain.out_s, plain.back_s) == (0.0, 0.0)
    assert (copied.out_s, copied.back_s) == (0.002, 0.001)
    assert copied.seconds == pytest.approx(plain.seconds + 0.003)
    costs = emulated_costs(PROFILE, swap)
    assert costs.out_s == costs.back_s == 0.001
    assert emulated_costs(PROFILE, None).out_s is None
