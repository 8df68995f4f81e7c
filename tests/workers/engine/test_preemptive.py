"""The live driver with FlowPrefill's scheduler, on the emulated device: suspension, wake-ups, a broken executor."""

from __future__ import annotations

import pytest

from controller.core.steps import FinishReason, Seq
from controller.core.types import LatencyCoefficients
from controller.engine import EngineConfig, EngineScheduler, PreemptionConfig, PreemptivePrefill
from controller.policies.batching import BATCHINGS
from controller.predict.boundaries import ComposedBoundaries, shape
from workers.engine.config import parse
from workers.engine.emulated import EmulatedExecutor
from workers.engine.engine import Engine
from workers.engine.profiles import Profile
from workers.engine.scheduler_choice import build_scheduler
from workers.engine.text.streams import Stream

LATENCY = LatencyCoefficients(0.01, 1e-3, 0.0, 0.005, 0.0, 0.0)  # 0.11 s for 100 tokens
PROFILE = Profile("test", "m", LATENCY, 4096)


class Clock:
    """Timers run when the test moves the time."""

    def __init__(self) -> None:
        self.time = 0.0
        self.timers: list[tuple[float, object]] = []

    def now(self) -> float:
        return self.time

    def call_at(self, when, callback):
        timer = (when, callback)
        self.timers.append(timer)
        return lambda: self.timers.remove(timer) if timer in self.timers else None

    def move_to(self, time: float) -> None:
        while self.timers and min(when for when, _ in self.timers) <= time:
            timer = min(self.timers, key=lambda found: found[0])
            self.timers.remove(timer)
            self.time = max(self.time, timer[0])
            timer[1]()
        self.time = time


def engine_of(boundary: str, **settings) -> tuple[Engine, Clock]:
    clock = Clock()
    config = EngineConfig(kv_blocks=256, max_model_len=1024, **settings)
    preemption = PreemptionConfig(boundary=boundary, chunk_tokens=100 if boundary == "chunk" else None)
    scheduler = build_scheduler(config, BATCHINGS["slo_aware_batching"](), preemption, LATENCY)
    engine = Engine("m", scheduler, clock.now)
    engine.call_at = clock.call_at
    stops = ComposedBoundaries(boundary, shape("llama3-8b"), LATENCY) if boundary in ("operator", "layer") else None
    engine.attach(EmulatedExecutor(PROFILE, clock, engine.handle, stops))
    return engine, clock


def submit(engine: Engine, name: str, tokens: int, ttft_s: float, max_tokens: int = 1, tpot_s: float = 10.0) -> Stream:
    now = engine.now()
    seq = Seq(name, now, tokens, max_tokens, ignore_eos=True, due=now + ttft_s, ttft_s=ttft_s, tpot_s=tpot_s)
    stream = Stream(seq, (), wake_each=True)
    engine.submit(stream)
    return stream


@pytest.mark.parametrize(
    ("boundary", "latest"),
    [("operator", 0.2 + 0.03 + 0.01), ("layer", 0.2 + 0.03 + 0.02), ("chunk", 0.2 + 0.03 + 0.12)],
)
def test_an_urgent_prompt_waits_for_the_next_boundary_only(boundary, latest):
    engine, clock = engine_of(boundary)
    long = submit(engine, "long", 500, ttft_s=5.0)  # 0.51 s alone
    clock.move_to(0.2)
    short = submit(engine, "short", 20, ttft_s=0.2)  # 0.03 s alone
    clock.move_to(2.0)
    assert short.seq.first_token_at <= latest
    assert short.seq.first_token_at < long.seq.first_token_at < 1.0
    assert engine.scheduler.rounds.signals == 1


def test_without_boundaries_it_waits_for_the_end():
    engine, clock = engine_of("none")
    long = submit(engine, "long", 500, ttft_s=5.0)
    clock.move_to(0.2)
    short = submit(engine, "short", 20, ttft_s=0.2)
    clock.move_to(2.0)
    assert short.seq.first_token_at > long.seq.first_token_at >= 0.5


def test_a_decode_step_is_put_in_when_its_time_has_come():
    """Nothing else happens while the long prompt runs: the scheduler must be woken."""
    engine, clock = engine_of("operator")
    decoding = submit(engine, "decoding", 10, ttft_s=1.0, max_tokens=4, tpot_s=0.1)
    clock.move_to(0.02)  # its first token
    submit(engine, "long", 900, ttft_s=5.0)  # 0.91 s alone
    clock.move_to(2.0)
    first, last = decoding.seq.first_token_at, decoding.seq.last_token_at
    assert (last - first) / 3 <= 0.1 + 0.01
    assert engine.scheduler.rounds.decode_turns >= 3


def test_a_broken_executor_ends_every_stream(caplog):
    engine, clock = engine_of("operator")
    stream, told = submit(engine, "a", 100, ttft_s=1.0), []
    engine.on_failure = lambda: told.append(True)
    engine.fail(MemoryError("no room"))
    engine.fail(MemoryError("again"))
    assert engine.failed
    assert told == [True]
    assert engine.failure == "no room"
    assert len(caplog.records) == 1  # the log ends with the cause
    assert stream.finish is FinishReason.ABORT
    clock.move_to(1.0)  # what the executor still says is not heard


def test_an_aborted_suspended_prompt_gives_its_blocks_back():
    engine, clock = engine_of("operator")
    long = submit(engine, "long", 500, ttft_s=5.0)
    clock.move_to(0.2)
    submit(engine, "short", 20, ttft_s=0.2)
    clock.move_to(0.215)  # the long one lies suspended, the short one runs
    engine.abort(long.seq)
    clock.move_to(2.0)
    engine.scheduler.check()
    assert engine.scheduler.idle
    assert engine.scheduler.blocks.free == 256


# ---- options --------------------------------------------------------------------------------------------------------


def test_the_preemptive_scheduler_believes_the_profile():
    config = parse(["--port", "1", "--scheduler", "preemptive", "--boundary", "layer", "--chunk-tokens", "512"])
    assert config.batching.name == "slo_aware_batching"
    latency = config.profile.coefficients
    scheduler = build_scheduler(config.engine, config.batching, config.preemption, latency)
    assert isinstance(scheduler, PreemptivePrefill)
    assert scheduler.preemption.boundary == "layer"
    assert scheduler.preemption.chunk_tokens == 512
    assert scheduler.preemption.decode_b == latency.decode_b
    assert scheduler.batching.config.prefill_b == latency.prefill_b


def test_the_continuous_scheduler_is_the_default():
    config = parse(["--port", "1"])
    assert config.preemption is None
    assert type(build_scheduler(config.engine, config.batching, None, None)) is EngineScheduler


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--boundary", "layer"], "--boundary: requires --scheduler preemptive"),
        (["--chunk-tokens", "9"], "--chunk-tokens: requires --scheduler preemptive"),
        (["--scheduler", "preemptive", "--boundary", "word"], "invalid choice: 'word'"),
        (["--scheduler", "preemptive", "--boundary", "chunk"], "--chunk-tokens: boundary chunk needs chunk_tokens"),
        (["--scheduler", "preemptive", "--batching", "vllm_v1"], "--batching: the preemptive scheduler batches by"),
        (["--executor", "torch"], "--model: the torch executor requires the folder of a model"),
        (["--executor", "torch", "--model", "/nowhere"], "--model: /nowhere is not a folder"),
    ],
)
def test_a_wrong_option_is_named(options, complaint, capsys):
    with pytest.raises(SystemExit):
        parse(["--port", "1", *options])
    assert complaint in capsys.readouterr().err
