"""Leaps: many equal steps handed over as one event must leave the engine as if they had been run one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.steps import Added, Finish, Reject, Start, Step, StepsDone
from controller.engine import EngineConfig, EngineScheduler
from controller.policies.batching import BATCHINGS
from tests.controller.engine.driver import make_seq

arrivals = st.lists(
    st.tuples(st.integers(0, 15), st.integers(1, 25), st.integers(1, 15), st.integers(0, 1)), min_size=1, max_size=12
)


class VirtualTime:
    """Every step takes a second; `most` bounds a leap."""

    def __init__(self, batching: str, kv_blocks: int, most: int) -> None:
        config = EngineConfig(
            kv_blocks=kv_blocks, block_size=4, max_model_len=40, max_num_seqs=4, max_num_batched_tokens=16
        )
        self.scheduler = EngineScheduler(config, BATCHINGS[batching]())
        self.most = most
        self.disturbed = False
        self.step: Step | None = None
        self.began = self.now = 0.0
        self.ended: dict[str, tuple[float, int, int]] = {}

    def play(self, script: list[tuple[int, int, int, int]]) -> None:
        due = 0.0
        for serial, (gap, prompt, output, priority) in enumerate(script):
            due += gap
            self._run_until(due)
            seq = make_seq(str(serial), prompt, output, priority=priority, arrival=due)
            self._send(Added(seq), due)
        self._run_until(float("inf"))

    def _run_until(self, when: float) -> None:
        """Complete steps until `when`; a leap that an arrival cuts short counts what was run by then."""
        while self.step is not None:
            times = 1 if self.disturbed else min(self.scheduler.repeats(), self.most)
            fits = times if when == float("inf") else min(times, max(0, int(when - self.began)))
            if fits < 1:
                return
            self._send(StepsDone(self.step.id, fits), self.began + fits)

    def _send(self, event: Added | StepsDone, now: float) -> None:
        self.now = now
        self.disturbed = isinstance(event, Added)  # a newcomer ends the leap with the step that is running
        if isinstance(event, StepsDone):
            self.step = None
        for action in self.scheduler.handle([event], now).actions:
            match action:
                case Start(step):
                    self.step, self.began = step, now
                case Finish(seq, _):
                    self.ended[seq.id] = (now, seq.output_tokens, seq.preemptions)
                case Reject(seq, code):
                    raise AssertionError(f"{seq.id} was rejected: {code}")
        self.scheduler.check()


@settings(max_examples=150, deadline=None)
@given(arrivals, st.sampled_from(list(BATCHINGS)), st.integers(10, 24))
def test_leaps_end_every_sequence_when_single_steps_do(script, batching, kv_blocks):
    single, leaping = VirtualTime(batching, kv_blocks, 1), VirtualTime(batching, kv_blocks, 10_000)
    single.play(script)
    leaping.play(script)
    assert len(leaping.ended) == len(script)
    assert leaping.ended == single.ended
    assert leaping.scheduler.totals == single.scheduler.totals
