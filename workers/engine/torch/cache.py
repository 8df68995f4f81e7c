"""The paged KV cache's memory. Which sequence has which block is the scheduler's book (`controller.engine.blocks`)."""

from __future__ import annotations

import torch

from workers.engine.kv.store import KvMismatch
from workers.engine.torch.config import TransformerConfig


class KVCache:
    """`memory[layer, 0]` holds keys, `memory[layer, 1]` values: (blocks, block_size, kv_heads, head_dim) each.

    Token `t` of a sequence lies in slot `blocks[t // block_size] * block_size + t % block_size`. Without `room` there
    is no memory yet; it can be given up and taken again. Nobody else may keep `keys`, `values` or `memory`: what they
    refer to would not be given up, and would not be what is taken later.
    """

    def __init__(
        self,
        config: TransformerConfig,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        world: int = 1,
        *,
        room: bool = True,
    ) -> None:
        self.block_size = block_size
        heads = config.kv_heads // world
        self._shape = (config.layers, 2, blocks, block_size, heads, config.head_dim)
        self._flat = (config.layers, 2, blocks * block_size, heads, config.head_dim)
        self._place, self._kind = device, dtype
        self.give_up()
        if room:
            self.take()

    @property
    def nbytes(self) -> int:
        """Of its memory, where it has it."""
        return self.memory.nbytes

    @property
    def held(self) -> bool:
        return bool(self._keys)

    @property
    def keys(self) -> list[torch.Tensor]:
        """By layer. Raises KvMismatch while there is no memory: a transfer that still goes on ends so."""
        self._require()
        return self._keys

    @property
    def values(self) -> list[torch.Tensor]:
        self._require()
        return self._values

    def take(self) -> None:
        """Make the memory, all zeros: what is masked is multiplied all the same, and must be numbers. Nothing if it is
        there. Raises RuntimeError, MemoryError; then nothing was taken."""
        if self.held:
            return
        memory = torch.zeros(self._shape, device=self._place, dtype=self._kind)
        if self._place.type == "cuda":  # KV that comes is written beside what is queued, so also beside the zeros
            torch.cuda.current_stream(self._place).synchronize()
        flat = memory.view(self._flat)
        self.memory = memory
        self._values: list[torch.Tensor] = [layer[1] for layer in flat]
        self._keys: list[torch.Tensor] = [layer[0] for layer in flat]

    def give_up(self) -> None:
        """While nobody computes with it, or needs what is in it."""
        self._keys = []
        self._values = []
        self.memory = torch.zeros(1, device=self._place, dtype=self._kind).expand(self._shape)  # its shape, no more
        if self._place.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep it for itself, and other engines of this device want it

    def slots(self, blocks: list[int], start: int, end: int) -> torch.Tensor:
        """Slots of tokens `start` to `end` of a sequence, on the CPU."""
        table = torch.tensor(blocks[: -(-end // self.block_size)], dtype=torch.long)
        tokens = torch.arange(start, end)
        return table[tokens // self.block_size] * self.block_size + tokens % self.block_size

    def _require(self) -> None:
        if not self._keys:
            raise KvMismatch("the memory of the KV cache has been given up: the engine sleeps")
