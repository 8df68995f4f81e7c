"""The KV cache of a vLLM server as bytes, block by block. Knows nothing of vLLM, and sees its tensors as arrays."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from controller.core.errors import ConfigError

FORMAT = 2  # of what is sent; another one is refused


class CacheBlocks:
    """`caches`: of each layer, bytes; the first dimension is the block, or a part of one. `blocks`: how many there are.
    `about`: what else must be the same at both ends. Raises ConfigError for caches of another form."""

    def __init__(self, caches: Mapping[str, np.ndarray], blocks: int, block_tokens: int, about: str) -> None:
        if not caches:
            raise ConfigError("the model has no KV cache")
        self._caches = list(caches.values())
        self._parts = [_parts(name, cache, blocks) for name, cache in caches.items()]
        self._bytes = [
            parts * math.prod(cache.shape[1:]) for cache, parts in zip(self._caches, self._parts, strict=True)
        ]
        self._count, self._block_tokens = blocks, block_tokens
        shapes = [
            (name, parts, cache.shape[1:]) for (name, cache), parts in zip(caches.items(), self._parts, strict=True)
        ]
        self._digest = hashlib.sha256(repr((about, shapes)).encode()).hexdigest()

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    @property
    def layers(self) -> int:
        return len(self._caches)

    def layer_bytes(self, layer: int) -> int:
        """Of one block."""
        return self._bytes[layer]

    @property
    def block_bytes(self) -> int:
        """Of all layers."""
        return sum(self._bytes)

    @property
    def layout(self) -> dict[str, Any]:
        """What both ends compare. `digest`: names and sizes of the layers, and `about`."""
        return {
            "format": FORMAT, "layers": self.layers, "block_tokens": self._block_tokens, "digest": self._digest,
        }  # fmt: skip

    def holds(self, blocks: Sequence[int]) -> bool:
        return all(0 <= block < self._count for block in blocks)

    def read(self, layer: int, blocks: Sequence[int]) -> bytes:
        return self._caches[layer][self._places(layer, blocks)].tobytes()

    def write(self, layer: int, blocks: Sequence[int], data: bytes) -> None:
        cache, places = self._caches[layer], self._places(layer, blocks)
        cache[places] = np.frombuffer(data, np.uint8).reshape(len(places), *cache.shape[1:])

    def _places(self, layer: int, blocks: Sequence[int]) -> np.ndarray:
        parts = self._parts[layer]
        first = np.asarray(blocks, np.int64) * parts
        return (first[:, None] + np.arange(parts)).reshape(-1)


def _parts(name: str, cache: np.ndarray, blocks: int) -> int:
    """Entries of the first dimension that make a block: kernels may have smaller ones than vLLM's scheduler."""
    if cache.dtype != np.uint8 or cache.ndim < 2 or not blocks or not cache.shape[0] or cache.shape[0] % blocks:
        raise ConfigError(f"the KV cache of {name} has the form {cache.shape}, which is not one of {blocks} blocks")
    return int(cache.shape[0] // blocks)
