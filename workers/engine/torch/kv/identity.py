"""The identity of the model that computed KV. Fine-tunes of one base model have the same shapes, but their KV is not
interchangeable.

A few places of some tensors are read from memory. That is cheap enough for each transfer, so no notification of
replaced weights is needed. It is not a proof, but further training nearly always changes some of these places, and a
copy never does.

KV outlives its weights if an engine falls asleep before another one has pulled it (`room`). While the weights are
absent, loading or being released, the identity is that of the last weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch

from workers.engine.torch.model.transformer import Model
from workers.engine.torch.streams import beside

TENSORS, PLACES = 128, 64
NO_MATTER = {"dtype", "eos", "max_positions"}  # fields of a config that do not change KV


class ModelIdentity:
    """The identity of a whole model, not of one of several ranks. `settled`: whether its weights are neither being
    loaded nor released. The code that does so sets it, and calls `now` before a release."""

    def __init__(self, model: Model) -> None:
        config = {key: value for key, value in non_default(model.config).items() if key not in NO_MATTER}
        self._config = json.dumps(config, sort_keys=True).encode()
        slots = model.slots()
        chosen = sorted(slots, key=_scattered)[:TENSORS]
        self._tensors = [slots[name].memory for name in chosen if slots[name].memory.is_contiguous()]
        self._device = model.device
        self._last = ""
        self.settled: Callable[[], bool] = lambda: True

    def now(self) -> str:
        """The identity; "" if no weights were present yet."""
        if self.settled() and all(memory.untyped_storage().nbytes() for memory in self._tensors):
            self._last = self._read()
        return self._last

    def _read(self) -> str:
        with torch.inference_mode(), beside(self._device, behind=False, purpose="identity"):
            places = torch.cat([_places(memory) for memory in self._tensors]).cpu()
        seen = hashlib.sha256(self._config)
        seen.update(places.view(torch.uint8).numpy().tobytes())
        return seen.hexdigest()[:32]


def non_default(config: Any) -> dict[str, Any]:
    """The fields of a config that differ from their defaults. So engines of two versions agree on a model if the newer
    one knows more fields, whose defaults mean the earlier behaviour."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            found[field.name] = non_default(value) if dataclasses.is_dataclass(value) else value
    return found


def _scattered(name: str) -> bytes:
    """A sort key that is the same in every process and unrelated to layers and kinds of tensors."""
    return hashlib.sha256(name.encode()).digest()


def _places(memory: torch.Tensor) -> torch.Tensor:
    """Evenly spaced elements; the step is odd, so that they are not all in one column."""
    flat = memory.view(-1)
    return flat[:: len(flat) // PLACES | 1][:PLACES]
