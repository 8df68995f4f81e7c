"""Reads and writes a real model's KV cache for transfers: for each token of a layer its key, then its value."""

from __future__ import annotations

import torch

from controller.core.steps import Seq
from workers.engine.kv.store import KvMismatch, Layout
from workers.engine.torch.kv.identity import ModelIdentity
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.model.transformer import Model
from workers.engine.torch.streams import beside


class TorchKv:
    """The KV of a real model. Only computed entries are read, and no step writes to the blocks of a sequence whose KV
    is kept or being received.

    `model`: the model of the cache. Without it, models of the same sizes are not distinguished.
    """

    def __init__(self, cache: KVCache, model: Model | None = None) -> None:
        layers, _, _, _, heads, dim = cache.memory.shape
        self.layers = layers
        self.token_bytes = 2 * heads * dim * cache.memory.element_size()
        self._cache = cache
        self._shape = (2, heads, dim)
        self._vocabulary = model.config.vocab_size if model is not None else 0
        self.identity = ModelIdentity(model) if model is not None else None

    @property
    def layout(self) -> Layout:
        dtype, (_, heads, dim) = f"{self._cache.memory.dtype}".removeprefix("torch."), self._shape
        model = self.identity.now() if self.identity is not None else ""
        return Layout(self.layers, self.token_bytes, dtype, heads, dim, self._vocabulary, model)

    def read(self, seq: Seq, layer: int, start: int, stop: int) -> bytes:
        with beside(self._cache.memory.device, behind=False):
            slots = self._slots(seq, start, stop)
            entries = torch.stack((self._cache.keys[layer][slots], self._cache.values[layer][slots]), dim=1)
            return entries.cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def write(self, seq: Seq, layer: int, start: int, data: bytes) -> None:
        count, rest = divmod(len(data), self.token_bytes)
        if rest:
            raise KvMismatch(f"layer {layer}: {len(data)} bytes are not whole tokens of {self.token_bytes}")
        memory = self._cache.memory
        with beside(memory.device, behind=False):
            slots = self._slots(seq, start, start + count)
            raw = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(memory.dtype)
            entries = raw.view(count, *self._shape).to(memory.device)
            self._cache.keys[layer][slots] = entries[:, 0]
            self._cache.values[layer][slots] = entries[:, 1]

    def _slots(self, seq: Seq, start: int, stop: int) -> torch.Tensor:
        if stop > len(seq.blocks) * self._cache.block_size:
            raise KvMismatch(f"sequence {seq.id} has no blocks for token {stop}")
        return self._cache.slots(seq.blocks, start, stop).to(self._cache.memory.device)
