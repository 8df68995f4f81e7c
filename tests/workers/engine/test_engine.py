"""The live driver without a server: what it does when a part of it breaks."""

import asyncio

import pytest

from controller.core.steps import FinishReason, Seq, Step, StepDone
from controller.engine import EngineConfig, EngineScheduler
from controller.policies.batching import BATCHINGS
from workers.engine.config import parse
from workers.engine.engine import Engine
from workers.engine.errors import HttpError
from workers.engine.http.generate import Generator
from workers.engine.http.requests import RequestRules, parse_completion
from workers.engine.text.streams import Stream
from workers.engine.text.tokenizer import ChunkTokenizer


class ManualExecutor:
    """Steps end when the test says so."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def start(self, step: Step) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.steps.clear()


def make_engine(**config: int) -> tuple[Engine, ManualExecutor]:
    sizes = EngineConfig(kv_blocks=64, max_model_len=64, **config)
    engine = Engine("m", EngineScheduler(sizes, BATCHINGS["chunked_prefill"]()), lambda: 1.0)
    executor = ManualExecutor()
    engine.attach(executor)
    return engine, executor


def submit(engine: Engine, name: str = "a") -> Stream:
    stream = Stream(Seq(engine.next_id(name), 0.0, 4, 4), (), wake_each=True)
    engine.submit(stream)
    return stream


def test_a_defect_ends_every_stream_and_the_engine():
    engine, _ = make_engine()
    failures: list[str] = []
    engine.on_failure = lambda: failures.append("told")
    streams = [submit(engine), submit(engine)]
    with pytest.raises(Exception, match="step 99 is not running"):
        engine.handle(StepDone(99, [], 0.1))
    assert engine.failed
    assert failures == ["told"]
    assert [stream.finish for stream in streams] == [FinishReason.ABORT] * 2
    with pytest.raises(HttpError) as caught:
        submit(engine)
    assert caught.value.status == 500


def test_abort_by_name_spares_others_and_longer_names():
    engine, executor = make_engine()
    victim, other, longer = submit(engine, "a"), submit(engine, "b"), submit(engine, "a-1")
    engine.abort_all(["a"])
    assert victim.finish is FinishReason.ABORT
    assert (other.finish, longer.finish) == (None, None)
    assert len(executor.steps) == 1


def test_closing_refuses_newcomers():
    engine, _ = make_engine()
    engine.closing = True
    with pytest.raises(HttpError, match="shutting down"):
        submit(engine)
    assert engine.streams == 0


def test_a_full_queue_leaves_nothing_behind():
    engine, _ = make_engine(max_num_seqs=1, max_waiting=0)
    submit(engine)
    with pytest.raises(HttpError, match="queue is full"):
        submit(engine)
    assert engine.streams == 1


async def test_the_waiting_time_begins_when_a_request_comes():
    """Two seconds of it passed before it was queued: another engine's prefix was copied."""
    now = [1.0]
    sizes = EngineConfig(kv_blocks=64, max_model_len=64)
    engine = Engine("m", EngineScheduler(sizes, BATCHINGS["chunked_prefill"]()), lambda: now[0])
    engine.attach(ManualExecutor())
    rules = RequestRules("m", 64, ChunkTokenizer())
    asked = parse_completion({"prompt": [1, 2, 3], "max_tokens": 4, "waiting_in": 2.5}, {}, rules)
    generator = Generator(engine, parse(["--model", "m", "--port", "0"]), rules)
    stream = Stream(generator._sequence(asked), (), wake_each=True)
    now[0] += 2.0
    generator._submit(stream, asked)
    assert stream.expiry is not None
    assert stream.expiry.when() - asyncio.get_running_loop().time() == pytest.approx(0.5, abs=0.1)
    engine.abort(stream.seq)
