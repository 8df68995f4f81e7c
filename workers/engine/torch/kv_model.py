"""Which model made KV: fine-tunes of one base differ in nothing but their weights, and entries of one mean nothing to
another.

Of the weights as they lie in memory, wherever they came from, a few places of some tensors are read: cheap enough to be
done for each transfer, so that nobody needs to say when weights were replaced. It is no proof: what was trained further
differs at some of these places nearly always, and a copy never does.

KV outlives its weights where an engine falls asleep before another one has taken it (`torch_room`): while they are not
there, or come and go, it is that of the weights that were there last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch

from workers.engine.torch.model import Model
from workers.engine.torch.streams import beside

TENSORS, PLACES = 128, 64
NO_MATTER = {"dtype", "eos", "max_positions"}  # of a config: entries are the same whatever these say


class ModelIdentity:
    """Of a whole model, not of one of several ranks. `settled`: its weights neither come nor go just now; whoever has
    them do that says it here, and asks `now` before they go."""

    def __init__(self, model: Model) -> None:
        config = {key: value for key, value in said(model.config).items() if key not in NO_MATTER}
        self._config = json.dumps(config, sort_keys=True).encode()
        slots = model.slots()
        chosen = sorted(slots, key=_scattered)[:TENSORS]
        self._tensors = [slots[name].memory for name in chosen if slots[name].memory.is_contiguous()]
        self._device = model.device
        self._last = ""
        self.settled: Callable[[], bool] = lambda: True

    def now(self) -> str:
        """ "" where no weights have been seen yet."""
        if self.settled() and all(memory.untyped_storage().nbytes() for memory in self._tensors):
            self._last = self._read()
        return self._last

    def _read(self) -> str:
        with torch.inference_mode(), beside(self._device, behind=False, purpose="identity"):
            places = torch.cat([_places(memory) for memory in self._tensors]).cpu()
        seen = hashlib.sha256(self._config)
        seen.update(places.view(torch.uint8).numpy().tobytes())
        return seen.hexdigest()[:32]


def said(config: Any) -> dict[str, Any]:
    """What a config says beyond its defaults: engines of two versions are of one model still where the newer one knows
    a field more, which says by its default what was meant before."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            found[field.name] = said(value) if dataclasses.is_dataclass(value) else value
    return found


def _scattered(name: str) -> bytes:
    """An order that is the same everywhere and has nothing to do with layers and kinds of tensors."""
    return hashlib.sha256(name.encode()).digest()


def _places(memory: torch.Tensor) -> torch.Tensor:
    """Evenly spread; by an odd step, so that they are not all of one column."""
    flat = memory.view(-1)
    return flat[:: len(flat) // PLACES | 1][:PLACES]
