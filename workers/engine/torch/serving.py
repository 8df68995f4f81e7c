"""Loads a model, attaches it to the engine, and measures its step times."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from controller.core.errors import ConfigError
from controller.core.steps import Chunk, Seq, Sink, Step
from controller.predict.latency_fit import DecodeSample, PrefillSample, fit
from workers.engine.engine import Engine
from workers.engine.model_config import TransformerConfig
from workers.engine.model_options import ModelOptions
from workers.engine.profiles import Profile
from workers.engine.torch.executor import TorchExecutor
from workers.engine.torch.group import RankGroup, RankLost, RankPart
from workers.engine.torch.model.batch import causal, segments_of
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.model.transformer import Model
from workers.engine.torch.ranks import Alone, Ranks
from workers.engine.torch.task import Boundary, OperatorProgram, StepTask
from workers.engine.torch.weights.files import load_weights

BOUNDARIES = {"operator": Boundary.OPERATOR, "layer": Boundary.LAYER}
PREFILL_LENGTHS = (16, 64, 256, 1024, 2048)
DECODE_BATCHES = (1, 4, 16)
DECODE_CONTEXT = 64
logger = logging.getLogger("workers.engine")


def load_program(
    folder: Path,
    config: TransformerConfig,
    *,
    device: str,
    dtype: str,
    blocks: int,
    block_size: int,
    threads: int | None = None,
    load: bool = True,
    room: bool = True,
    ranks: Ranks | None = None,
) -> OperatorProgram:
    """Create the model and its KV cache. `load`: whether to load the weights; `room`: whether to allocate memory for
    weights and KV. `ranks`: of which this process is one.

    Raises ConfigError if the device does not exist, and WeightsError if the checkpoint does not fit.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available", "device")
    mine = ranks or Alone()
    if device == "cuda" and torch.cuda.device_count() < mine.world:
        raise ConfigError(f"{mine.world} ranks require as many CUDA devices", "tensor_parallel")
    place = torch.device(device, mine.rank) if device == "cuda" else torch.device(device)
    causal(1, 1, place)  # what it imports must not wait for the first prompt that is read in pieces
    kind, began = getattr(torch, dtype), time.monotonic()
    with _room(config, blocks):
        model = Model(config, place, kind, mine, room=room)
        cache = KVCache(config, blocks, block_size, place, kind, mine.world, room=room)
    size = load_weights(model.slots(), folder) if load else 0
    seconds = time.monotonic() - began
    held = f"{cache.nbytes / 1e6:.1f} MB" + ("" if room else " (allocated with the weights)")
    logger.info("loaded %.1f MB from %s in %.2f s; KV cache %s, %s", size / 1e6, folder, seconds, held, dtype)
    return OperatorProgram(model, cache)


@contextlib.contextmanager
def _room(config: TransformerConfig, blocks: int) -> Iterator[None]:
    """Raises ConfigError with the sizes of the model if there is not enough memory."""
    try:
        yield
    except RuntimeError as error:
        sizes = f"hidden_size={config.hidden_size}, vocab_size={config.vocab_size}, num_hidden_layers={config.layers}"
        reason = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(f"not enough memory for {sizes} and {blocks} KV blocks: {reason}", "model") from error


def load_ranks(
    options: ModelOptions, *, blocks: int, block_size: int, load: bool, room: bool, boundary: str | None
) -> tuple[OperatorProgram, RankGroup]:
    """The program of the first rank, and the other ranks, each a process. Raises what load_program raises, and
    RankLost."""
    world = options.ranks
    threads = options.threads or (max(1, (os.cpu_count() or 1) // world) if options.device == "cpu" else None)
    same: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "blocks": blocks,
        "block_size": block_size,
    }

    def part(rank: int, port: int) -> RankPart:
        return RankPart(
            *(rank, world, port, options.folder, options.config),
            **same,
            threads=threads,
            load=load,
            room=room,
            boundary=boundary,
        )

    group = RankGroup(part, world, options.device)
    program = load_program(
        options.folder, options.config, **same, threads=threads, load=load, room=room, ranks=group.ranks
    )
    group.answers()
    logger.info("%d tensor-parallel ranks: this process and %s", world, ", ".join(map(str, group.pids)))
    return program, group


def attach_torch(
    engine: Engine,
    program: OperatorProgram,
    loop: asyncio.AbstractEventLoop,
    boundary: Literal["operator", "layer"] | None,
    group: RankGroup | None = None,
) -> None:
    """Attach the executor to the engine. `boundary` None: steps are never suspended."""
    sink: Sink = engine.handle
    where = BOUNDARIES[boundary] if boundary else None

    def post(callback: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(callback)

    engine.attach(TorchExecutor(program, sink, post, engine.fail, boundary=where, group=group))
    if group is not None:
        group.lost = lambda error: _lost(engine, loop, error)


def _lost(engine: Engine, loop: asyncio.AbstractEventLoop, error: RankLost) -> None:
    """Called from the thread that watches the ranks."""
    with contextlib.suppress(RuntimeError):  # the event loop has ended, and so has the engine
        loop.call_soon_threadsafe(engine.fail, error)


# ---- measuring step times -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Runs steps with sequences on the first blocks of an unused cache. `tokens`: capacity of the cache."""

    program: OperatorProgram
    tokens: int
    group: RankGroup | None

    def seconds(self, step: Step) -> float:
        task = StepTask(0, self.program, segments_of(step))
        if self.group is not None:
            self.group.run_whole(segments_of(step))
        began = time.perf_counter()
        while not task.over:
            task.advance()
        if (device := self.program.model.device).type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    def seq(self, tokens: int, first_block: int, computed: int) -> Seq:
        size = self.program.cache.block_size
        blocks = list(range(first_block, first_block + -(-tokens // size)))
        return Seq("scratch", 0.0, tokens, 1, token_ids=[7] * tokens, computed=computed, blocks=blocks)


@torch.inference_mode()
def measure(program: OperatorProgram, name: str, longest: int, group: RankGroup | None = None) -> Profile:
    """Measure prefills and decodes of a few sizes, up to `longest` tokens, and fit HyperFlexis eq. 1 and 2 to them.

    Each is run twice, and the second run counts. The cache must be unused; its content is arbitrary afterwards.
    """
    capacity = program.cache.memory.shape[2] * program.cache.block_size
    scratch = _Scratch(program, capacity, group)
    prefills = [n for n in PREFILL_LENGTHS if n <= min(longest, capacity)] or [min(longest, capacity)]
    prefill = [PrefillSample(n, n * n, _prefill_s(scratch, n)) for n in prefills]
    context = min(DECODE_CONTEXT, longest, capacity)
    batches = [b for b in DECODE_BATCHES if b * (context + program.cache.block_size) <= capacity] or [1]
    decode = [DecodeSample(b, b * context, _decode_s(scratch, b, context)) for b in batches]
    found = fit(prefill, decode)
    logger.info("measured %s: median error of the fit %.0f %%", found.coefficients, 100 * found.prefill_median_error)
    return Profile("measured", name, found.coefficients, capacity)


def _prefill_s(scratch: _Scratch, tokens: int) -> float:
    step = Step(0, (Chunk(scratch.seq(tokens, 0, 0), 0, tokens, last=True),), (), 0)
    return [scratch.seconds(step) for _ in range(2)][-1]


def _decode_s(scratch: _Scratch, batch: int, context: int) -> float:
    each = -(-context // scratch.program.cache.block_size)
    seqs = tuple(scratch.seq(context, index * each, context - 1) for index in range(batch))
    return [scratch.seconds(Step(0, (), seqs, batch * context)) for _ in range(2)][-1]
