"""The paged KV cache's memory. Which sequence has which block is the scheduler's book (`controller.engine.blocks`)."""

from __future__ import annotations

import torch

from workers.engine.torch_config import ModelConfig


class KVCache:
    """`memory[layer, 0]` holds keys, `memory[layer, 1]` values: (blocks, block_size, kv_heads, head_dim) each.

    Token `t` of a sequence lies in slot `blocks[t // block_size] * block_size + t % block_size`.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        world: int = 1,
    ) -> None:
        self.block_size = block_size
        heads = config.kv_heads // world
        shape = (config.layers, 2, blocks, block_size, heads, config.head_dim)
        self.memory = torch.zeros(shape, device=device, dtype=dtype)
        flat = self.memory.view(config.layers, 2, blocks * block_size, heads, config.head_dim)
        self.keys = [flat[layer, 0] for layer in range(config.layers)]
        self.values = [flat[layer, 1] for layer in range(config.layers)]

    def slots(self, blocks: list[int], start: int, end: int) -> torch.Tensor:
        """Slots of tokens `start` to `end` of a sequence, on the CPU."""
        table = torch.tensor(blocks[: -(-end // self.block_size)], dtype=torch.long)
        tokens = torch.arange(start, end)
        return table[tokens // self.block_size] * self.block_size + tokens % self.block_size
