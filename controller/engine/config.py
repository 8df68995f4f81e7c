"""Sizes and limits of one engine, checked when the config is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from controller.core.errors import ConfigError

SchedulingPolicy = Literal["priority", "fcfs"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Lengths in tokens. `max_waiting` bounds the queue (None: unbounded); sequences beyond it are rejected."""

    kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    scheduling_policy: SchedulingPolicy = "priority"
    max_waiting: int | None = None
    prefix_caching: bool = True
    copies_blocks: bool = True  # whether the executor can copy a block, for branches
    pinned_share: float = 0.25  # of the blocks, that checkpoints may hold
    swap_blocks: int = 0  # host memory for the KV of evicted sequences, in blocks; 0: they are recomputed

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)
        if not 0.0 <= self.pinned_share <= 1.0:
            raise ConfigError(f"pinned_share must be between 0 and 1, got {self.pinned_share}", field="pinned_share")
        if self.swap_blocks < 0:
            raise ConfigError(f"swap_blocks must be at least 0, got {self.swap_blocks}", field="swap_blocks")
        if self.max_waiting is not None and self.max_waiting < 0:
            raise ConfigError(f"max_waiting must be at least 0, got {self.max_waiting}", field="max_waiting")
        if self.scheduling_policy not in ("priority", "fcfs"):
            raise ConfigError(
                f"unknown scheduling_policy {self.scheduling_policy!r}; valid: fcfs, priority",
                field="scheduling_policy",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs a token a step",
                field="max_num_batched_tokens",
            )
        if self.max_model_len > self.kv_capacity_tokens:
            raise ConfigError(
                f"max_model_len ({self.max_model_len}) must fit into the KV cache of {self.kv_capacity_tokens} tokens "
                f"({self.kv_blocks} blocks of {self.block_size})",
                field="max_model_len",
            )

    @property
    def kv_capacity_tokens(self) -> int:
        return self.kv_blocks * self.block_size
