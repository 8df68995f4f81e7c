"""Host memory for the KV of evicted sequences, and what copies to it and prompts cost, measured at the start.

The memory is allocated at the start, pinned if the model is on a CUDA device, so that copies are asynchronous to the
host and no later request can fail for lack of it. A block's entries of all layers lie together here, while the cache
has a place for each layer, so a copy gathers blocks on the device first, a few at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from controller.core.errors import ConfigError
from controller.core.steps import Chunk, Seq, Step
from controller.engine.kv_costs import MeasuredCosts
from workers.engine.torch.model.batch import segments_of
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.task import OperatorProgram, StepTask
from workers.engine.weights.host_copy import available

Pairs = Sequence[tuple[int, int]]  # of blocks, from and to
AT_ONCE = 32  # blocks that are gathered at a time, which bounds the device memory that this needs
MEASURED_BLOCKS = 16
MEASURED_PROMPTS = (16, 64, 256, 1024)  # tokens


class HostBlocks:
    """`blocks` blocks of host memory for one cache. Raises ConfigError if there is not enough memory."""

    def __init__(self, cache: KVCache, blocks: int) -> None:
        self._cache = cache
        shape = cache.memory.shape
        pinned = cache.memory.device.type == "cuda"
        _check_room(blocks * (cache.nbytes // shape[2]))
        try:
            memory = torch.empty(
                (blocks, *shape[:2], *shape[3:]), dtype=cache.memory.dtype, device="cpu", pin_memory=pinned
            )
            self._memory = memory.zero_()  # touched now, so that the first copy is not slow
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0][:200]
            raise ConfigError(f"not enough host memory for {blocks} KV blocks: {reason}", "swap_bytes") from error

    @property
    def blocks(self) -> int:
        return int(self._memory.shape[0])

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def out(self, pairs: Pairs) -> float:
        """Copy KV blocks to host blocks. Returns the seconds that it took, until the copies are there."""
        return self._timed(pairs, self._copy_out)

    def back(self, pairs: Pairs) -> float:
        """Copy host blocks to KV blocks."""
        return self._timed(pairs, self._copy_back)

    def _timed(self, pairs: Pairs, copy: Callable[[Pairs], None]) -> float:
        if not pairs:
            return 0.0
        self._synchronise()  # the work before it is not its own
        began = time.perf_counter()
        for first in range(0, len(pairs), AT_ONCE):
            copy(pairs[first : first + AT_ONCE])
        self._synchronise()
        return time.perf_counter() - began

    def _copy_out(self, pairs: Pairs) -> None:
        memory = self._cache.memory
        places = torch.tensor([source for source, _ in pairs], device=memory.device)
        gathered = memory.index_select(2, places).permute(2, 0, 1, 3, 4, 5).contiguous()
        for index, (_, target) in enumerate(pairs):
            self._memory[target].copy_(gathered[index], non_blocking=True)

    def _copy_back(self, pairs: Pairs) -> None:
        memory = self._cache.memory
        gathered = torch.empty((len(pairs), *self._memory.shape[1:]), dtype=memory.dtype, device=memory.device)
        for index, (source, _) in enumerate(pairs):
            gathered[index].copy_(self._memory[source], non_blocking=True)
        places = torch.tensor([target for _, target in pairs], device=memory.device)
        memory.index_copy_(2, places, gathered.permute(1, 2, 0, 3, 4, 5))

    def _synchronise(self) -> None:
        device = self._cache.memory.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _check_room(nbytes: int) -> None:
    """Touching more than there is would end other programs of the host too."""
    with contextlib.suppress(OSError):  # a host that does not tell
        if nbytes > (there := available()):
            raise ConfigError(
                f"not enough host memory: {nbytes / 1e9:.2f} GB, and {there / 1e9:.2f} GB are available", "swap_bytes"
            )


@torch.inference_mode()
def measure_costs(program: OperatorProgram, longest: int) -> MeasuredCosts:
    """Measure copies of a few blocks, if the program has host memory, and prompts of up to `longest` tokens.

    Each is run twice, and the second run counts. The cache must be unused; its content is arbitrary afterwards.
    """
    cache, host = program.cache, program.host
    blocks = cache.memory.shape[2]
    out_s = back_s = None
    if host is not None:
        count = min(MEASURED_BLOCKS, blocks, host.blocks)
        pairs = [(index, index) for index in range(count)]
        out_s = [host.out(pairs) for _ in range(2)][-1] / count
        back_s = [host.back(pairs) for _ in range(2)][-1] / count
    most = min(longest, blocks * cache.block_size)
    lengths = [length for length in MEASURED_PROMPTS if length <= most] or [most]
    return MeasuredCosts(out_s, back_s, {length // 2: _prompt_s(program, length) / length for length in lengths})


def _prompt_s(program: OperatorProgram, tokens: int) -> float:
    seq = Seq("", 0.0, tokens, 1, token_ids=[7] * tokens)
    seq.blocks = list(range(-(-tokens // program.cache.block_size)))
    step = Step(0, (Chunk(seq, 0, tokens, last=True),), (), 0)
    seconds = 0.0
    for _ in range(2):
        task, began = StepTask(0, program, segments_of(step)), time.perf_counter()
        while not task.over:
            task.advance()
        if (device := program.model.device).type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return seconds
