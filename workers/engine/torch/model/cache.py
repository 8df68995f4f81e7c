"""The memory of the paged KV cache. The scheduler assigns its blocks to sequences (`controller.engine.blocks`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.engine.kv.store import KvMismatch
from workers.engine.model_config import TransformerConfig


class KVCache:
    """`memory[layer, 0]` holds keys, `memory[layer, 1]` values: (blocks, block_size, kv_heads, head_dim) each.

    Token `t` of a sequence is in slot `blocks[t // block_size] * block_size + t % block_size`. Without `room` there is
    no memory at first; it can be released and allocated again. Callers must not keep `keys`, `values` or `memory`:
    their memory would not be released, and would not be the memory that is allocated later.
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
        """Bytes of its memory, also while that is released."""
        return self.memory.nbytes

    @property
    def held(self) -> bool:
        return bool(self._keys)

    @property
    def keys(self) -> list[torch.Tensor]:
        """Keys by layer. Raises KvMismatch while there is no memory, which ends a transfer that is still in
        progress."""
        self._require()
        return self._keys

    @property
    def values(self) -> list[torch.Tensor]:
        self._require()
        return self._values

    def take(self) -> None:
        """Allocate the memory, unless it is allocated. It is zeroed, since masked entries are multiplied too and must
        be numbers. Raises RuntimeError, MemoryError; then nothing is allocated."""
        if self.held:
            return
        memory = torch.zeros(self._shape, device=self._place, dtype=self._kind)
        if self._place.type == "cuda":  # received KV is written on another stream, so the zeros must be written first
            torch.cuda.current_stream(self._place).synchronize()
        flat = memory.view(self._flat)
        self.memory = memory
        self._values: list[torch.Tensor] = [layer[1] for layer in flat]
        self._keys: list[torch.Tensor] = [layer[0] for layer in flat]

    def give_up(self) -> None:
        """Release the memory. No step may be using it, and its content is lost."""
        self._keys = []
        self._values = []
        self.memory = torch.zeros(1, device=self._place, dtype=self._kind).expand(self._shape)  # the shape only
        if self._place.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep the memory, which other engines of this device need

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, from and to, in their order."""
        for source, target in blocks:
            self.memory[:, :, target] = self.memory[:, :, source]

    def slots(self, blocks: list[int], start: int, end: int) -> torch.Tensor:
        """Slots of tokens `start` to `end` of a sequence, on the CPU."""
        table = torch.tensor(blocks[: -(-end // self.block_size)], dtype=torch.long)
        tokens = torch.arange(start, end)
        return table[tokens // self.block_size] * self.block_size + tokens % self.block_size

    def _require(self) -> None:
        if not self._keys:
            raise KvMismatch("the memory of the KV cache is released, since the engine is asleep")
