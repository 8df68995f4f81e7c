"""The identity of a checkpoint: distinguishes weights of the same names and shapes without reading all of them.

Fine-tunes of one base model have the same config.json, names, types and shapes, and lengths and times of files mean
nothing for a folder that was copied by hand. So a few places of every tensor are read: further training changes some of
them, while a copy of the folder, or the same tensors in other files, changes none. It is not a proof, since an edit of
a few rows may lie between the places. Weights that arrive are checked in full against the source's digests.

An identity ends with a dot and a hash of config.json alone, which is all that an engine without weights can ask for.
This module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from controller.core.errors import SlacklineError

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PLACE_BYTES = 4096
PLACES = 3  # of a tensor: beginning, middle, end
MOST_PLACES = 8192  # of a checkpoint, but at least one for each tensor: a model may have thousands of experts
MOST_HEADER = 100_000_000  # limit of the safetensors format
ANY = "."  # an identity that begins with it matches any checkpoint whose identity ends with it
NO_MARK = {"_name_or_path", "transformers_version"}  # keys of config.json that change without the model


class UnreadableCheckpoint(SlacklineError):
    """The identity of the checkpoint cannot be determined."""


class _Tensor(NamedTuple):
    """The place of a tensor. `begin`: byte offset in its file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    nbytes: int


class CheckpointIdentity:
    """The identity of the checkpoint in a folder. Thread-safe. It is read again only if a file was written or
    replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reading = threading.Lock()
        self._marks: tuple[str, ...] = ()
        self._found = ""

    def now(self) -> str:
        """The identity of the files now. If they cannot be read any more, the last one, since other sources are used
        when a disk is unavailable. Raises UnreadableCheckpoint."""
        with self._reading:
            marks = marks_of(self._folder)
            if self._found and marks == self._marks:
                return self._found
            try:
                found = identity_of(self._folder)
            except OSError as error:
                if self._found:
                    return self._found
                raise UnreadableCheckpoint(f"the checkpoint in {self._folder} cannot be read: {error}") from error
            if marks_of(self._folder) != marks:
                raise UnreadableCheckpoint(f"the checkpoint in {self._folder} was changed while it was read")
            self._marks, self._found = marks, found
            return found

    def wanted(self) -> str:
        """The identity to request from another engine: this checkpoint's. Without weights in the folder, it matches any
        checkpoint with this config.json, and begins with the dot. Raises UnreadableCheckpoint."""
        try:
            return self.now()
        except UnreadableCheckpoint:
            if any((self._folder / name).exists() for name in (SINGLE, INDEX)):
                raise
            with contextlib.suppress(OSError, ValueError):
                return _mark_of(_config(self._folder))
            raise

    def of(self, marks: tuple[str, ...]) -> str:
        """The identity of what was read since the files had these marks; "" if they have changed or cannot be read."""
        with contextlib.suppress(UnreadableCheckpoint):
            found = self.now()
            return found if marks == self._marks == marks_of(self._folder) else ""
        return ""


def marks_of(folder: Path) -> tuple[str, ...]:
    """Marks of the checkpoint's files, which change if any file is written or replaced."""
    found = []
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        with contextlib.suppress(OSError):
            is_now = path.stat()
            marks = (is_now.st_dev, is_now.st_ino, is_now.st_size, is_now.st_mtime_ns, is_now.st_ctime_ns)
            found.append(f"{path.resolve()} {marks}")
    return tuple(found)


def identity_of(folder: Path) -> str:
    """The identity of the checkpoint. Raises OSError, UnreadableCheckpoint."""
    try:
        config = _config(folder)
        tensors = dict(sorted(_tensors(folder)))
        seen = hashlib.blake2b(config, digest_size=16)
        places = max(1, min(PLACES, MOST_PLACES // max(1, len(tensors))))
        with contextlib.ExitStack() as closing:
            files = {
                path: closing.enter_context(path.open("rb", buffering=0))
                for path in {tensor.file for tensor in tensors.values()}
            }
            for name, tensor in tensors.items():  # ordered by name, so that shards do not matter
                seen.update(f"\n{name} {tensor.dtype} {tensor.shape} {tensor.nbytes}\n".encode())
                for at in _places(tensor, places):
                    files[tensor.file].seek(at)
                    seen.update(files[tensor.file].read(min(PLACE_BYTES, tensor.begin + tensor.nbytes - at)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableCheckpoint(f"the checkpoint in {folder} cannot be read: {error!r}") from error
    return seen.hexdigest() + _mark_of(config)


def _config(folder: Path) -> bytes:
    """The content of config.json in a canonical form. Raises OSError, ValueError."""
    found = {key: value for key, value in _object(folder / CONFIG).items() if key not in NO_MARK}
    return json.dumps(found, sort_keys=True).encode()


def _mark_of(config: bytes) -> str:
    return ANY + hashlib.blake2b(config, digest_size=8).hexdigest()


def _places(tensor: _Tensor, count: int) -> Iterator[int]:
    last = max(0, tensor.nbytes - PLACE_BYTES)
    steps = [0, last // 2, last] if count == PLACES else [last // 2, last][:count]
    return (tensor.begin + at for at in sorted(set(steps)))


def _tensors(folder: Path) -> Iterator[tuple[str, _Tensor]]:
    """The tensors of the files that an engine reads: the single one, or those of the index. Raises OSError, ValueError,
    KeyError, TypeError, AttributeError."""
    files = [SINGLE] if (folder / SINGLE).is_file() else sorted(set(_object(folder / INDEX)["weight_map"].values()))
    for path in (folder / str(file) for file in files):
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > MOST_HEADER:
                raise ValueError(f"{path} is not a safetensors file")
            header = json.loads(handle.read(length))
        for name, said in header.items():
            if name != "__metadata__":
                begin, end = (int(offset) for offset in said["data_offsets"])
                where = 8 + length + begin
                yield name, _Tensor(str(said["dtype"]), tuple(map(int, said["shape"])), path, where, end - begin)


def _object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found
