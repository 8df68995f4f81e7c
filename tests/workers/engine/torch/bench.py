"""A scheduler and the PyTorch executor, driven by the test's own loop; and random tiny models to run."""

from __future__ import annotations

import atexit
import queue
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch

from controller.core.steps import (
    Aborted,
    Added,
    Discard,
    Emit,
    EngineAction,
    EngineEvent,
    Finish,
    Resume,
    Sampling,
    Seq,
    Start,
    StepDone,
    Suspend,
    Suspended,
)
from controller.engine import EngineConfig, EngineScheduler
from controller.policies.batching import BATCHINGS
from workers.engine.model_config import read_config
from workers.engine.torch.executor import TorchExecutor
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.model.random import main
from workers.engine.torch.model.transformer import Model
from workers.engine.torch.ranks import Ranks
from workers.engine.torch.task import Boundary, OperatorProgram
from workers.engine.torch.weights.files import load_weights

torch.set_num_threads(1)
VOCABULARY = 500
WAIT_S = 30.0
CPU = torch.device("cpu")


@cache
def folder(architecture: str = "LlamaForCausalLM", *options: str) -> Path:
    """A random model of two layers, 64 wide, in two files; made once a session, and gone with it."""
    path = Path(mkdtemp(prefix="slackline-model-"))
    atexit.register(rmtree, path, ignore_errors=True)
    sizes = ("--layers", "2", "--hidden", "64", "--vocabulary", str(VOCABULARY), "--context", "512")
    main([str(path), "--architecture", architecture, *sizes, *options])
    return path


def program(
    path: Path, blocks: int = 64, block_size: int = 4, ranks: Ranks | None = None, device: torch.device = CPU
) -> OperatorProgram:
    config = read_config(path)
    model = Model(config, device, torch.float32, ranks)
    load_weights(model.slots(), path)
    world = ranks.world if ranks else 1
    return OperatorProgram(model, KVCache(config, blocks, block_size, device, torch.float32, world))


def engine_config(blocks: int = 64, **settings: int) -> EngineConfig:
    sizes = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 160, **settings}
    return EngineConfig(kv_blocks=blocks, **sizes)  # type: ignore[arg-type]


class Bench:
    """`tokens[id]` is what a client would have seen. `on_event` is called with each event before it is handed in."""

    def __init__(
        self,
        program: OperatorProgram,
        scheduler: EngineScheduler | None = None,
        boundary: Boundary | None = Boundary.OPERATOR,
    ) -> None:
        self.scheduler = scheduler or EngineScheduler(engine_config(), BATCHINGS["chunked_prefill"]())
        self.events: queue.Queue[EngineEvent | Exception] = queue.Queue()
        self.executor = TorchExecutor(program, self.events.put, lambda call: call(), self.events.put, boundary=boundary)
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.log: list[EngineEvent] = []
        self.on_start: Callable[[int], None] = lambda step_id: None
        self.now = 0.0

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 12, **fields: object) -> Seq:
        seq = Seq(name, self.now, len(prompt), max_tokens, token_ids=list(prompt), **fields)  # type: ignore[arg-type]
        self.tokens[name] = []
        self.hand_in(Added(seq))
        return seq

    def hand_in(self, *events: EngineEvent) -> None:
        self.now += 0.001
        for action in self.scheduler.handle(events, self.now).actions:
            self._perform(action)

    def abort(self, seq: Seq) -> None:
        self.hand_in(Aborted(seq))

    def _perform(self, action: EngineAction) -> None:
        match action:
            case Start(step):
                self.executor.start(step)
                self.on_start(step.id)
            case Suspend(step_id):
                self.executor.suspend(step_id)
            case Resume(step_id):
                self.executor.resume(step_id)
            case Discard(step_id):
                self.executor.discard(step_id)
            case Emit(seq, token, finish):
                self.tokens[seq.id].append(token)
                if finish is not None:
                    self.ended.add(seq.id)
            case Finish(seq, _):
                self.ended.add(seq.id)

    def next_event(self) -> EngineEvent:
        event = self.events.get(timeout=WAIT_S)
        if isinstance(event, Exception):
            raise event
        return event

    def run(self) -> dict[str, list[int]]:
        """Until nothing is left to do."""
        while not self.scheduler.idle:
            event = self.next_event()
            self.log.append(event)
            self.hand_in(event)
            self.scheduler.check()
        return self.tokens

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.log)

    def close(self) -> None:
        self.executor.close()


class Interrupting(TorchExecutor):
    """Suspends every step over and over, as often as it will, and resumes it; the scheduler never knows."""

    def __init__(self, program: OperatorProgram, events: queue.Queue, boundary: Boundary) -> None:
        self._out = events
        self.suspensions = 0
        super().__init__(program, self._sinked, lambda call: call(), events.put, boundary=boundary)

    def start(self, step) -> None:
        super().start(step)
        self.suspend(step.id)

    def _sinked(self, event: StepDone | Suspended) -> None:
        if isinstance(event, StepDone):
            self._out.put(event)
            return
        self.suspensions += 1
        self.resume(event.step_id)
        self.suspend(event.step_id)


def interrupted(
    path: Path, asked: list[list[int]], boundary: Boundary, **made: Any
) -> tuple[dict[str, list[int]], Bench]:
    """Tokens of these prompts where every step is left over and over. `made`: what its programs are besides."""
    bench = Bench(program(path, **made), boundary=boundary)
    bench.executor.close()
    bench.executor = Interrupting(program(path, **made), bench.events, boundary)
    for index, prompt in enumerate(asked):
        bench.add(str(index), prompt)
    tokens = bench.run()
    bench.close()
    return tokens, bench


def prompts(count: int, seed: int = 1, longest: int = 40, shared: int = 12) -> list[list[int]]:
    """Random prompts; every third begins like the first."""
    rng = random.Random(seed)
    found: list[list[int]] = []
    for index in range(count):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))]
        found.append(found[0][:shared] + own if index % 3 == 2 else own)
    return found


def hot(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    return Sampling(temperature, top_k, top_p)
