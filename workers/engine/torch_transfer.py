"""A model's weights in memory: named, checked, given away and taken, tensor by tensor, over torch.distributed.

Two engines meet at a TCP store that the receiver opens and form a group of two (gloo on CPUs, NCCL on CUDA), apart from
any group the model itself uses. The sender keeps serving: its tensors are only read. Every tensor has a digest (XXH3)
which the receiver checks, so that what arrives is what the other engine runs on.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from workers.engine.torch_weights import Slot, WeightsError, load_weights

IN_FLIGHT = 16  # tensors on their way at a time
SENDER, RECEIVER = 0, 1


class TensorInfo(NamedTuple):
    """One tensor as it lies in an engine's memory (a rank's part of it)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


class WeightMemory:
    """The memory behind a model's slots. `present`: it holds a whole, checked set of weights."""

    def __init__(self, slots: Mapping[str, Slot], *, present: bool) -> None:
        self.present = present
        self._memory = {name: slots[name].memory for name in sorted(slots)}
        self._slots = slots
        storages = {m.untyped_storage().data_ptr(): m.untyped_storage() for m in self._memory.values()}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self._digests: dict[str, str] | None = None
        self._host: dict[str, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    @property
    def has_host_copy(self) -> bool:
        return self._host is not None

    def drop_host_copy(self) -> None:
        self._host = None

    def keep_host_copy(self) -> None:
        """Before a release: a copy to come back from."""
        self._require()
        self._host = {name: memory.detach().cpu().clone() for name, memory in self._memory.items()}

    def release(self) -> None:
        """Give the memory back; tensors keep their shapes and hold nothing."""
        self.present = False
        for storage, _ in self._storages:
            storage.resize_(0)

    def _make_room(self) -> None:
        """Raises RuntimeError (out of memory)."""
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)
                if storage.device.type == "cpu":
                    _advise_huge_pages(storage.data_ptr(), size)

    def manifest(self) -> list[TensorInfo]:
        """Computed once: weights do not change while they are present."""
        self._require()
        if self._digests is None:
            self._digests = {name: digest(memory) for name, memory in self._memory.items()}
        return [
            TensorInfo(name, str(memory.dtype), tuple(memory.shape), self._digests[name])
            for name, memory in self._memory.items()
        ]

    def _require(self) -> None:
        if not self.present:
            raise WeightsError("this engine holds no weights")

    # ---- the three sources -----------------------------------------------------------------------------------------

    def load_disk(self, folder: Path) -> int:
        """Bytes read. Raises WeightsError; then nothing is present."""
        self._begin()
        read = load_weights(self._slots, folder)
        self.present = True
        return read

    def load_host(self) -> int:
        if self._host is None:
            raise WeightsError("there is no copy in host memory")
        self._begin()
        for name, memory in self._memory.items():
            memory.copy_(self._host[name])
        self.present = True
        return self.nbytes

    def receive(self, store: dist.Store, theirs: Sequence[TensorInfo], timeout_s: float) -> int:
        """From the engine whose manifest is given. Raises WeightsError; then nothing is present."""
        self.check(theirs)
        self._begin()
        wanted = {info.name: info.digest for info in theirs}
        group = _group(store, RECEIVER, self._device, timeout_s)
        try:
            for name, memory in self._received(group):
                if digest(memory) != wanted[name]:
                    raise WeightsError(f"tensor {name} arrived damaged")
        except RuntimeError as error:
            raise WeightsError(f"the transfer broke off: {_first_line(error)}") from error
        self._digests = wanted
        self.present = True
        return self.nbytes

    def check(self, theirs: Sequence[TensorInfo]) -> None:
        """Raise WeightsError naming the first tensor that differs."""
        found = {info.name: info for info in theirs}
        for name, memory in self._memory.items():
            info = found.pop(name, None)
            if info is None:
                raise WeightsError(f"the source lacks tensor {name}")
            if (info.dtype, tuple(info.shape)) != (str(memory.dtype), tuple(memory.shape)):
                ours = f"{list(memory.shape)} {memory.dtype}"
                raise WeightsError(f"tensor {name} is {list(info.shape)} {info.dtype} at the source, {ours} here")
        if found:
            raise WeightsError(f"the source has another model: tensor {min(found)} is not known here")

    def _begin(self) -> None:
        self.present, self._digests = False, None
        self._make_room()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._memory.values())).device

    # ---- the wire --------------------------------------------------------------------------------------------------

    def send(self, host: str, port: int, timeout_s: float) -> int:
        """To the engine that waits at this store. Bytes sent; raises WeightsError."""
        self._require()
        try:
            store = dist.TCPStore(host, port, 2, is_master=False, timeout=timedelta(seconds=timeout_s))
            group = _group(store, SENDER, self._device, timeout_s)
            pending: deque[Any] = deque()
            for tag, memory in enumerate(self._memory.values()):
                block = memory.contiguous()
                pending.append((group.send([block.view(torch.uint8).flatten()], RECEIVER, tag), block))
                if len(pending) >= IN_FLIGHT:
                    pending.popleft()[0].wait()
            for work, _ in pending:
                work.wait()
        except RuntimeError as error:
            raise WeightsError(f"sending broke off: {_first_line(error)}") from error
        return self.nbytes

    def _received(self, group: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once it is in its place. Memory that is a slice of something wider takes a detour."""
        pending: deque[Any] = deque()
        for tag, (name, memory) in enumerate(self._memory.items()):
            block = (
                memory if memory.is_contiguous() else torch.empty_like(memory, memory_format=torch.contiguous_format)
            )
            work = group.recv([block.view(torch.uint8).view(-1)], SENDER, tag)
            pending.append((work, name, memory, block))
            if len(pending) >= IN_FLIGHT:
                yield _landed(*pending.popleft())
        while pending:
            yield _landed(*pending.popleft())


def _landed(work: Any, name: str, memory: torch.Tensor, block: torch.Tensor) -> tuple[str, torch.Tensor]:
    work.wait()
    if block is not memory:
        memory.copy_(block)
    return name, memory


def _group(store: dist.Store, rank: int, device: torch.device, timeout_s: float) -> Any:
    if device.type == "cuda":
        return dist.ProcessGroupNCCL(store, rank, 2, timedelta(seconds=timeout_s))
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s))


def _advise_huge_pages(address: int, size: int) -> None:
    """Fresh memory is handed out page by page at first touch: 2 MB at a time costs a fraction of 4 kB at a time.

    Only advice: where the kernel does not take it (or is no Linux), nothing is lost.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    if (length := address + size - begin) > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


def digest(memory: torch.Tensor) -> str:
    """XXH3 of the tensor's bytes, on the host. Not through numpy: it would pin the storage to its size."""
    flat = memory.detach().cpu().contiguous()
    return xxhash.xxh3_64_hexdigest((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
