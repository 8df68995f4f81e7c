"""Reads and writes the KV entries of an engine, layer by layer, for KV transfers.

`EmulatedKv` is for the emulated executor, which has no KV. Its entries are bytes of the size that a real model's would
have, computed from the tokens, so that the receiver can check what arrives. They are not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from controller.core.errors import SlacklineError
from controller.core.steps import Seq


class KvMismatch(SlacklineError):
    """The received data is not the KV of these tokens."""


class Layout(NamedTuple):
    """The layout of KV, which must be the same on both sides; otherwise a model would continue fluently and wrongly.
    `token_bytes`: of one token in one layer; `vocabulary`: its size, 0 if it does not matter; `model`: distinguishes
    models of the same sizes, "" if unknown."""

    layers: int
    token_bytes: int
    dtype: str = ""
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 0
    model: str = ""

    def as_json(self, asked: Any) -> dict[str, Any]:
        """The fields that an engine asked for. An engine of an older version asks for none and accepts no others than
        it knows."""
        names = (*ALWAYS_TOLD, *(asked if isinstance(asked, list) else ()))
        return {name: value for name, value in self._asdict().items() if name in names}


ALWAYS_TOLD = ("layers", "token_bytes")  # engines of all versions send and compare these
ASKED_FOR = tuple(name for name in Layout._fields if name not in ALWAYS_TOLD)


class KvStore(Protocol):
    """The KV of an executor. The blocks of a sequence must cover all positions that are read or written."""

    @property
    def layers(self) -> int: ...

    @property
    def token_bytes(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def read(self, seq: Seq, layer: int, start: int, stop: int) -> bytes:
        """The entries of the tokens at positions `start` to `stop`."""
        ...

    def write(self, seq: Seq, layer: int, start: int, data: bytes) -> None:
        """Write entries from position `start` on. Raises KvMismatch if they cannot belong to these tokens."""
        ...


class EmulatedKv:
    """`token_bytes` is rounded up to a multiple of eight. `model`: name of the emulated model."""

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
