"""Prompts that are computed while another engine sends layers of their prefix: scheduler and emulated device, on a
clock that the test moves."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial

import pytest

from controller.core.steps import (
    Aborted,
    Added,
    CacheReset,
    ComingPrefix,
    Discard,
    Emit,
    EngineEvent,
    LayersCame,
    Paused,
    PrefixEnded,
    Reserve,
    Resume,
    Resumed,
    Seq,
    SeqState,
    Start,
    Suspend,
    Suspended,
)
from controller.core.types import LatencyCoefficients
from controller.engine import EngineConfig, EngineScheduler, PreemptionConfig, PreemptivePrefill
from controller.policies.batching import BATCHINGS
from controller.policies.batching.slo_aware_batching import SloAwareBatching, SloAwareBatchingConfig
from controller.predict.boundaries import ComposedBoundaries, shape
from workers.engine.emulated import EmulatedExecutor
from workers.engine.profiles import Profile

LAYERS, BLOCK = 4, 16
TOKEN_S = 0.001
PROFILE = Profile("test", "m", LatencyCoefficients(0.0, TOKEN_S, 0, 0.01, 0, 0), 1000)
PREFIX, REST = 160, 100  # tokens; the rest takes 0.1 s


class Clock:
    """The bench's time, as executors read it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.call_at = bench.call_at

    def now(self) -> float:
        return self._bench.now


class Bench:
    """`at` says what happens when; `run` moves the clock until nothing is left to do."""

    def __init__(self, kv_blocks: int = 64, boundary: str = "operator") -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        rules = SloAwareBatching(SloAwareBatchingConfig(0.0, TOKEN_S, 0.0, 4096, "s_edf", True))
        config = EngineConfig(kv_blocks=kv_blocks, block_size=BLOCK, max_model_len=kv_blocks * BLOCK, max_num_seqs=8)
        self.scheduler = PreemptivePrefill(config, rules, PreemptionConfig(boundary=boundary))  # type: ignore[arg-type]
        boundaries = ComposedBoundaries("layer", shape("llama3-8b"), PROFILE.coefficients)
        self.device = EmulatedExecutor(
            PROFILE, Clock(self), self.handle, boundaries if boundary != "none" else None, layers=LAYERS
        )
        self.first_tokens: dict[str, float] = {}
        self.parts: list[tuple[float, str]] = []  # what the device was told, and what it said of itself

    def call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        entry = (max(when, self.now), next(self._numbers), callback)
        heapq.heappush(self._due, entry)
        return lambda: self._due.remove(entry) if entry in self._due else None

    def at(self, when: float, *events: EngineEvent) -> None:
        for event in events:
            self.call_at(when, partial(self.handle, event))

    def run(self) -> None:
        while self._due:
            heapq.heapify(self._due)
            self.now, _, callback = heapq.heappop(self._due)
            callback()

    def handle(self, event: EngineEvent) -> None:
        if isinstance(event, Suspended):
            self.parts.append((round(self.now, 4), f"lacks {event.layers}" if event.layers else "stopped"))
        for action in self.scheduler.handle([event], self.now).actions:
            match action:
                case Start(step):
                    names = " ".join(chunk.seq.id for chunk in step.chunks)
                    self.parts.append((round(self.now, 4), f"start {names}" if names else "decode"))
                    self.device.start(step)
                case Suspend(step_id):
                    self.device.suspend(step_id)
                case Resume(step_id):
                    self.parts.append((round(self.now, 4), "resume"))
                    self.device.resume(step_id)
                case Discard(step_id):
                    self.parts.append((round(self.now, 4), "discard"))
                    self.device.discard(step_id)
                case Emit(seq):
                    self.first_tokens.setdefault(seq.id, round(self.now, 4))
        self.scheduler.check()

    # ---- prompts ------------------------------------------------------------------------------------------------

    def borrows(self, name: str = "A", output: int = 1) -> tuple[Seq, ComingPrefix]:
        """A prompt whose prefix has blocks here and whose layers come."""
        tokens = list(range(PREFIX + REST))
        prefix = Seq(f"prefix of {name}", 0.0, PREFIX, 1, token_ids=tokens[:PREFIX])
        self.handle(Reserve(prefix, needed=False))
        assert prefix.state is SeqState.ARRIVING
        coming = ComingPrefix(prefix)
        seq = Seq(name, 0.0, PREFIX + REST, output, token_ids=tokens, ignore_eos=True, coming=coming)
        return seq, coming

    def layers_come(self, coming: ComingPrefix, *when: float, ends: float | None = None) -> None:
        for index, moment in enumerate(when):
            self.at(moment, LayersCame(coming, index + 1))
        if ends is not None:
            self.at(ends, PrefixEnded(coming.seq, coming.seq.tokens if len(when) == LAYERS else 0))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_it_computes_the_layers_that_are_here_and_waits_for_the_others(bench: Bench) -> None:
    seq, coming = bench.borrows()
    bench.layers_come(coming, 0.0, 0.01, 0.1, 0.11, ends=0.12)
    bench.at(0.0, Added(seq))
    bench.run()
    assert bench.parts == [(0.0, "start A"), (0.05, "lacks 3"), (0.1, "resume")]
    assert bench.first_tokens == {"A": 0.15}
    assert (seq.cached, bench.scheduler.rounds.layer_waits) == (PREFIX, 1)
    assert bench.scheduler.blocks.usage == 0
    assert bench.scheduler.idle


def test_a_copy_faster_than_computing_delays_nothing(bench: Bench) -> None:
    seq, coming = bench.borrows()
    bench.layers_come(coming, 0.0, 0.01, 0.02, 0.03, ends=0.031)
    bench.at(0.0, Added(seq))
    bench.run()
    assert (bench.parts, bench.first_tokens) == ([(0.0, "start A")], {"A": 0.1})


def test_others_run_while_it_waits(bench: Bench) -> None:
    seq, coming = bench.borrows()
    bench.layers_come(coming, 0.0, 0.2, 0.21, 0.22, ends=0.23)
    other = Seq("B", 0.01, 50, 1, token_ids=[7] * 50, ignore_eos=True)
    bench.at(0.0, Added(seq))
    bench.at(0.01, Added(other))
    bench.run()
    assert bench.parts[:4] == [(0.0, "start A"), (0.025, "lacks 2"), (0.025, "start B"), (0.2, "resume")]
    assert bench.first_tokens == {"B": 0.075, "A": 0.275}


def test_what_decodes_goes_on_while_it_waits(bench: Bench) -> None:
    seq, coming = bench.borrows()
    bench.layers_come(coming, 0.1, 0.5, 0.51, 0.52, ends=0.53)
    other = Seq("B", 0.0, 50, 5, token_ids=[7] * 50, ignore_eos=True)
    bench.at(0.0, Added(other))
    bench.at(0.1, Added(seq))
    bench.run()
    assert other.state is SeqState.FINISHED
    assert other.last_token_at is not None
    assert other.last_token_at < 0.5
    assert bench.first_tokens["A"] == pytest.approx(0.575)


@pytest.mark.parametrize("when", [0.01, 0.04], ids=["while it computes", "while it waits"])
def test_a_lost_prefix_is_computed(bench: Bench, when: float) -> None:
    seq, coming = bench.borrows()
    bench.layers_come(coming, 0.0, ends=when)
    bench.at(0.0, Added(seq))
    bench.run()
    again = max(when, 0.025)
    assert bench.parts == [(0.0, "start A"), (0.025, "lacks 2"), (again, "discard"), (again, "start A")]
    assert bench.first_tokens == {"A": pytest.approx(again + (PREFIX + REST) * TOKEN_S)}
    assert (seq.cached, seq.coming) == (0, None)
    assert bench.scheduler.blocks.usage == 0
    assert bench.scheduler.idle


def test_a_prefix_that_is_lost_before_its_prompt_runs_is_computed(bench: Bench) -> None:
    seq, coming = bench.borrows()
    urgent = Seq("B", 0.0, 100, 1, token_ids=[7] * 100, ignore_eos=True, due=0.11)
    bench.at(0.0, Added(urgent), Added(seq))
    bench.layers_come(coming, 0.0, ends=0.05)
    bench.run()
    assert bench.first_tokens == {"B": 0.1, "A": 0.36}
    assert seq.cached == 0


def test_one_that_hangs_up_while_it_waits_leaves_nothing(bench: Bench) -> None:
    seq, coming = bench.borrows()
    bench.layers_come(coming, 0.0, ends=0.06)
    bench.at(0.0, Added(seq))
    bench.at(0.05, Aborted(seq))
    bench.run()
    assert bench.first_tokens == {}
    assert bench.scheduler.blocks.usage == 0
    assert bench.scheduler.idle
    assert bench.parts[-1] == (0.05, "discard")


def test_blocks_are_shared_with_the_copy_and_not_needed_twice(bench: Bench) -> None:
    small = Bench(kv_blocks=(PREFIX + REST + BLOCK - 1) // BLOCK)
    seq, coming = small.borrows()
    small.layers_come(coming, 0.0, 0.01, 0.02, 0.03, ends=0.031)
    small.at(0.0, Added(seq))
    small.run()
    assert small.first_tokens == {"A": 0.1}


@pytest.mark.parametrize("boundary", ["none", "operator"])
def test_it_waits_for_layers_wherever_others_may_preempt_it(boundary: str) -> None:
    bench = Bench(boundary=boundary)
    seq, coming = bench.borrows()
    bench.layers_come(coming, 0.0, 0.1, 0.1, 0.1, ends=0.1)
    bench.at(0.0, Added(seq))
    bench.run()
    assert bench.parts == [(0.0, "start A"), (0.025, "lacks 2"), (0.1, "resume")]


def test_a_more_urgent_prompt_preempts_it_and_it_goes_on(bench: Bench) -> None:
    seq, coming = bench.borrows()
    bench.layers_come(coming, 0.0, 0.0, 0.0, 0.2, ends=0.21)
    urgent = Seq("B", 0.01, 20, 1, token_ids=[7] * 20, ignore_eos=True, due=0.04)
    bench.at(0.0, Added(seq))
    bench.at(0.01, Added(urgent))
    bench.run()
    assert (0.2, "resume") in bench.parts
    assert any(said == "stopped" for _, said in bench.parts)
    assert bench.first_tokens["A"] == pytest.approx(0.225)


def test_kv_that_is_given_up_during_the_copy_is_computed_and_not_cached(bench: Bench) -> None:
    """Asleep, the engine has no KV memory: what had come is gone, and what comes then goes nowhere."""
    seq, coming = bench.borrows()
    bench.layers_come(coming, 0.0, 0.1, 0.11, 0.12, ends=0.13)
    bench.at(0.0, Added(seq))
    bench.at(0.05, Paused(release_kv=True))
    bench.at(0.2, Resumed())
    bench.run()
    assert bench.first_tokens == {"A": pytest.approx(0.2 + (PREFIX + REST) * TOKEN_S)}
    assert seq.cached == 0


def test_a_copy_across_a_pause_without_memory_is_not_cached(bench: Bench) -> None:
    _, coming = bench.borrows()
    bench.at(0.05, Paused(release_kv=True))
    bench.at(0.06, Resumed())
    bench.layers_come(coming, 0.0, 0.0, 0.0, 0.1, ends=0.13)
    bench.run()
    later = Seq("later", 1.0, PREFIX + REST, 1, token_ids=list(range(PREFIX + REST)))
    assert bench.scheduler.blocks.cached_tokens(later) == 0


def test_a_reset_cache_leaves_a_waiting_prompt_nothing_to_share(bench: Bench) -> None:
    seq, coming = bench.borrows()
    urgent = Seq("B", 0.0, 100, 1, token_ids=[7] * 100, ignore_eos=True, due=0.11)
    bench.at(0.0, Added(urgent), Added(seq))
    bench.at(0.05, CacheReset())
    bench.layers_come(coming, 0.0, 0.2, 0.2, 0.2, ends=0.2)
    bench.run()
    assert (seq.cached, bench.first_tokens["A"]) == (0, 0.36)


def test_a_scheduler_without_suspended_steps_does_not_share_what_is_not_here() -> None:
    config = EngineConfig(kv_blocks=64, block_size=BLOCK, max_model_len=1000)
    scheduler = EngineScheduler(config, BATCHINGS["chunked_prefill"]())
    prefix = Seq("p", 0.0, PREFIX, 1, token_ids=list(range(PREFIX)))
    scheduler.handle([Reserve(prefix, needed=False)], 0.0)
    seq = Seq("A", 0.0, PREFIX + 1, 1, token_ids=list(range(PREFIX + 1)), coming=ComingPrefix(prefix))
    scheduler.handle([Added(seq)], 0.0)
    assert (seq.cached, seq.coming) == (0, None)
