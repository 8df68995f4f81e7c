"""Where an engine's KV entries can be read from and written to, layer by layer, by whoever moves them.

`EmulatedKv` belongs to the emulated executor, which has no KV: its entries are real bytes of the size a real model's
would have, made from the tokens, so that what arrives can be told from anything else. Nothing is kept of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from controller.core.errors import SlacklineError
from controller.core.steps import Seq


class KvMismatch(SlacklineError):
    """What came is not the KV of these tokens."""


class Layout(NamedTuple):
    """What must be the same at both ends: where any of it differs, the same bytes are other entries, from which a model
    goes on fluently and wrongly. `token_bytes`: of one token in one layer; `vocabulary`: how many tokens there are, 0
    where it does not matter; `model`: tells it from models of the same sizes, "" where nothing does."""

    layers: int
    token_bytes: int
    dtype: str = ""
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 0
    model: str = ""

    def told(self, asked: Any) -> dict[str, Any]:
        """What is said of it to an engine that asks for these names: an older one asks for none, and takes no answer
        that says more than it knows."""
        names = (*ALWAYS_TOLD, *(asked if isinstance(asked, list) else ()))
        return {name: value for name, value in self._asdict().items() if name in names}


ALWAYS_TOLD = ("layers", "token_bytes")  # engines of all versions say and compare these
ASKED_FOR = tuple(name for name in Layout._fields if name not in ALWAYS_TOLD)


class KvStore(Protocol):
    """Blocks of the sequence cover all positions named."""

    @property
    def layers(self) -> int: ...

    @property
    def token_bytes(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def read(self, seq: Seq, layer: int, start: int, stop: int) -> bytes:
        """Entries of the tokens at positions `start` to `stop`."""
        ...

    def write(self, seq: Seq, layer: int, start: int, data: bytes) -> None:
        """Entries from position `start` on. Raises KvMismatch where they cannot be these tokens'."""
        ...


class EmulatedKv:
    """`token_bytes` is rounded up to eight. `model`: the name of the one that is emulated."""

    def __init__(self, layers: int, token_bytes: int, model: str = "") -> None:
        self.layers = layers
        self.token_bytes = -(-token_bytes // 8) * 8
        self._model = model

    @property
    def layout(self) -> Layout:
        return Layout(self.layers, self.token_bytes, model=self._model)

    def read(self, seq: Seq, layer: int, start: int, stop: int) -> bytes:
        return self._entries(_tokens(seq)[start:stop], layer)

    def write(self, seq: Seq, layer: int, start: int, data: bytes) -> None:
        stop = start + len(data) // self.token_bytes
        if data != self._entries(_tokens(seq)[start:stop], layer):
            raise KvMismatch(f"layer {layer}, tokens {start} to {stop}: not the KV of this prompt")

    def _entries(self, tokens: Sequence[int], layer: int) -> bytes:
        marks = (np.asarray(tokens, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(layer)
        return np.repeat(marks, self.token_bytes // 8).tobytes()


def _tokens(seq: Seq) -> Sequence[int]:
    if seq.token_ids is None:
        raise KvMismatch(f"sequence {seq.id} has no token ids")
    return seq.token_ids
