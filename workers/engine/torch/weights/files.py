"""Reads weights from safetensors files. All tensors are checked against the model before anything is loaded.

A model offers its memory as slots, one for each tensor name of the checkpoint. A slot is a view into the model's own
(often fused) tensors, so weights that are loaded or received by name are written where the model uses them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from controller.core.errors import SlacklineError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
logger = logging.getLogger("workers.engine")


class WeightsError(SlacklineError):
    """The checkpoint is damaged or belongs to another model. The message names the tensor and the file."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The memory of one tensor of a checkpoint. `shape`: of the whole tensor; `part`: the part that this rank keeps."""

    memory: torch.Tensor
    shape: tuple[int, ...]
    part: tuple[slice, ...] = ()


class Checkpoint:
    """The tensors of a folder: one `model.safetensors`, or shards with an index. Headers are read immediately. Raises
    WeightsError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = self._files()
        self._handles = {file: _opened(folder / file) for file in sorted(set(self._file_of.values()))}
        held = {file: set(handle.keys()) for file, handle in self._handles.items()}
        for name, file in self._file_of.items():
            if name not in held[file]:
                raise WeightsError(f"tensor {name} is not in {folder / file}, where {INDEX} says it is")

    def _files(self) -> dict[str, str]:
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(_opened(self.folder / SINGLE).keys(), SINGLE)
        path = self.folder / INDEX
        if not path.is_file():
            raise WeightsError(f"{self.folder} has neither {SINGLE} nor {INDEX}")
        try:
            found = json.loads(path.read_text())["weight_map"]
            return {str(name): str(file) for name, file in found.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{path}: no valid weight_map ({error!r})") from error

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def where(self, name: str) -> Path:
        return self.folder / self._file_of[name]

    def check(self, wanted: Mapping[str, Slot]) -> None:
        """Raises WeightsError unless every wanted tensor exists with its shape and a floating type."""
        for name, slot in wanted.items():
            if name not in self._file_of:
                raise WeightsError(f"tensor {name} is missing from {self.folder} ({len(self._file_of)} tensors there)")
            view = self._handles[self._file_of[name]].get_slice(name)
            if tuple(view.get_shape()) != slot.shape:
                found, expected = list(view.get_shape()), list(slot.shape)
                raise WeightsError(f"tensor {name} in {self.where(name)} has shape {found}, the model needs {expected}")
            if view.get_dtype() not in DTYPES:
                raise WeightsError(f"tensor {name} in {self.where(name)} is {view.get_dtype()}, not a floating type")
        if unused := sorted(self.names - set(wanted)):
            logger.warning("%d tensors of %s are not used, such as %s", len(unused), self.folder, unused[0])

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        view = self._handles[self._file_of[name]].get_slice(name)
        try:
            return view[part or ...]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"tensor {name} in {self.where(name)}: {error}") from error


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a complete safetensors file: {error}") from error


def load_weights(slots: Mapping[str, Slot], folder: Path) -> int:
    """Fill every slot from the folder; returns the bytes read. Nothing is written until all names, shapes and types are
    checked. Raises WeightsError."""
    return fill(slots, opened(slots, folder))


def opened(slots: Mapping[str, Slot], folder: Path) -> Checkpoint:
    """The checkpoint in the folder, with names, shapes and types checked. Raises WeightsError."""
    checkpoint = Checkpoint(folder)
    checkpoint.check(slots)
    return checkpoint


def fill(slots: Mapping[str, Slot], checkpoint: Checkpoint) -> int:
    """Fill the slots; returns the bytes read. Raises WeightsError at the first tensor with values that are not
    finite."""
    read = 0
    for name, slot in slots.items():
        tensor = checkpoint.read(name, slot.part)
        slot.memory.copy_(tensor)
        if not _finite(slot.memory):
            kind = f"{slot.memory.dtype}".removeprefix("torch.")
            raise WeightsError(f"tensor {name} in {checkpoint.where(name)} has values that are not finite ({kind})")
        read += tensor.nbytes
    return read


def _finite(memory: torch.Tensor) -> bool:
    """Whether all values are finite. A sum is the cheapest test, since one value that is not finite makes it so. As a
    sum may also overflow, the smallest and the largest value are tested then."""
    with torch.no_grad():
        wide = torch.float32 if memory.element_size() < 4 else memory.dtype
        if torch.isfinite(memory.sum(dtype=wide)):
            return True
        return all(bool(torch.isfinite(bound)) for bound in torch.aminmax(memory))
