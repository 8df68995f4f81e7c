"""A model's weights in memory: named, checked, given away and taken, tensor by tensor, over torch.distributed.

Two engines that have met (`torch_meeting`) form a group of two (gloo on CPUs, NCCL on CUDA), apart from any group the
model itself uses. The sender keeps serving: its tensors are only read. Every tensor has a digest (`torch_digest`) which
the receiver checks, so that what arrives is what the other engine runs on. Tensors travel in pieces (`torch_pieces`),
so that the wait for the next one can be short: a peer that was killed may say nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from workers.engine.torch.digest import algorithm_of, digest, native
from workers.engine.torch.meeting import RECEIVER, SENDER, Meeting
from workers.engine.torch.pieces import IN_FLIGHT_BYTES, passed
from workers.engine.torch.streams import beside
from workers.engine.torch.weights import Slot, WeightsError, fill, opened
from workers.engine.weights.host_copy import WHOLE, CopyEntry, digests_of


class TensorInfo(NamedTuple):
    """One tensor as it lies in an engine's memory (a rank's part of it)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


class WeightMemory:
    """The memory behind a model's slots. `present`: it holds a whole, checked set of weights; `keep_room`: it is never
    given back (see `reserve`). `ranked`: one of several ranks, of which another may yet fail to load what this one has
    loaded: a copy in host memory stays until it is dropped."""

    def __init__(
        self, slots: Mapping[str, Slot], *, present: bool, keep_room: bool = False, ranked: bool = False
    ) -> None:
        self.present = present
        self._keep_room, self._ranked = keep_room, ranked
        self._memory = {name: slots[name].memory for name in sorted(slots)}
        self._slots = slots
        self._storages = _storages(slots)
        self.digested = 0  # bytes, of the newest digest
        self._digests: dict[str, str] | None = None
        self._digesting = threading.Lock()
        self._loads = 0
        self._host: dict[str, torch.Tensor] | None = None
        self._host_digests: dict[str, str] = {}

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
        digests = {info.name: info.digest for info in self.manifest()}
        self._host = None  # an older one: three times the weights would not fit where twice does
        with beside(self._device, behind=True, purpose="copies"):
            self._host = {name: memory.detach().to("cpu", copy=True) for name, memory in self._memory.items()}
        self._host_digests = digests

    def entries(self) -> list[CopyEntry]:
        """What a copy for other engines holds, in the order of `blocks`."""
        sizes = {name: memory.nbytes for name, memory in self._memory.items()}
        return [CopyEntry(each.name, each.dtype, each.shape, sizes[each.name], each.digest) for each in self.manifest()]

    def blocks(self) -> Iterator[memoryview]:
        """The bytes of each tensor, on the host."""
        for memory in self._memory.values():
            with beside(self._device, behind=True, purpose="copies"):
                flat = memory.detach().cpu().contiguous()
            yield memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")

    def release(self) -> None:
        """Give the memory back (but with `keep_room`); tensors keep their shapes and hold nothing."""
        self.present = False
        if self._keep_room:
            return
        for storage, _ in self._storages:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep it for itself, and other engines of this device want it

    def _make_room(self) -> None:
        """Raises RuntimeError (out of memory)."""
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)
                if storage.device.type == "cpu":
                    _advise_huge_pages(storage.data_ptr(), size)

    def manifest(self) -> list[TensorInfo]:
        """Computed once: weights do not change while they are present. Who asks meanwhile waits for it, in a thread.
        Raises WeightsError."""
        self._require()
        with self._digesting:
            digests = self._digests if self._digests is not None else self._digested()
        return [
            TensorInfo(name, str(memory.dtype), tuple(memory.shape), digests[name])
            for name, memory in self._memory.items()
        ]

    def _digested(self) -> dict[str, str]:
        found, load, self.digested = {}, self._loads, 0
        with beside(self._device, behind=True, purpose="digests"):
            for name, memory in self._memory.items():
                found[name] = digest(memory)
                self.digested += memory.nbytes
        self._require()
        if self._loads != load:
            raise WeightsError("the weights were loaded anew while they were digested")
        self._digests = found
        return found

    def _require(self) -> None:
        if not self.present:
            raise WeightsError("this engine holds no weights")

    # ---- the three sources -----------------------------------------------------------------------------------------

    def load_disk(self, folder: Path) -> int:
        """Bytes read. Raises WeightsError; then nothing is present."""
        self.present = False
        checkpoint = opened(self._slots, folder)  # before room is made for it, at the price of a copy maybe
        self._begin()
        read = fill(self._slots, checkpoint)
        self._came()
        return read

    def load_host(self, shared: Path | None = None) -> int:
        """From the copy that this engine kept, else from the one that this host's engines share, in that folder.

        Raises WeightsError, and RuntimeError where there is no memory; then nothing is present. A damaged copy of its
        own is given up; one that there was no room for is whole, and there for the next try.
        """
        if self._host is not None:
            self._begin(from_copy=True)
            try:
                return self._copied(self._host.__getitem__, self._host_digests)
            except WeightsError:
                self.drop_host_copy()
                raise
        if shared is None:
            raise WeightsError("there is no copy in host memory")
        checkpoint = opened(self._slots, shared)
        self._begin()
        return self._copied(checkpoint.read, _digests(shared))

    def _copied(self, read: Callable[[str], torch.Tensor], digests: Mapping[str, str]) -> int:
        """Each tensor is digested on the side that its algorithm is for: nothing is copied back."""
        own = native(self._device)
        for name, memory in self._memory.items():
            expected, copy = digests.get(name, ""), read(name)
            if (algorithm := _algorithm(name, expected)) != own and digest(copy, algorithm) != expected:
                raise _damaged(name)
            memory.copy_(copy)
            if algorithm == own and digest(memory) != expected:
                raise _damaged(name)
        if all(_algorithm(name, expected) == own for name, expected in digests.items()):
            self._digests = dict(digests)  # others must be made before they can be told to a receiver
        self._came()
        return self.nbytes

    def receive(self, meeting: Meeting, theirs: Sequence[TensorInfo]) -> int:
        """From the engine whose manifest is given. Raises WeightsError; then nothing is present."""
        self.check(theirs)
        self._begin()
        wanted = {info.name: info.digest for info in theirs}

        def take(group: Any) -> None:
            for name, memory in self._received(group):
                if digest(memory) != wanted[name]:
                    raise WeightsError(f"tensor {name} arrived damaged")
            meeting.landed()

        _together(meeting, RECEIVER, self._device, take, "the transfer broke off")
        self._digests = wanted
        self._came()
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
            if (algorithm := _algorithm(name, info.digest)) != native(memory.device):
                raise WeightsError(f"the source digests with {algorithm}, this engine with {native(memory.device)}")
        if found:
            raise WeightsError(f"the source has another model: tensor {min(found)} is not known here")

    def _begin(self, *, from_copy: bool = False) -> None:
        """Makes room. A copy in host memory that is not read goes where host memory is what lacks. Raises RuntimeError
        (out of memory)."""
        self.present, self._digests = False, None
        self._loads += 1
        try:
            self._make_room()
        except RuntimeError as error:
            if from_copy or self._host is None or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            self.drop_host_copy()
            self._make_room()

    def _came(self) -> None:
        """Weights that are present need no copy beside them, wherever they came from."""
        self.present = True
        if not self._ranked:
            self.drop_host_copy()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._memory.values())).device

    # ---- the wire --------------------------------------------------------------------------------------------------

    def send(self, meeting: Meeting) -> int:
        """To the engine that was met. Bytes sent; raises WeightsError."""
        self._require()

        largest = max(memory.nbytes for memory in self._memory.values())

        def give(group: Any) -> None:
            for _ in passed(group.send, RECEIVER, self._blocks()):
                pass
            meeting.wait_landed(IN_FLIGHT_BYTES + largest)  # what is on its way, and a digest

        _together(meeting, SENDER, self._device, give, "sending broke off")
        return self.nbytes

    def _blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, memory.contiguous()) for name, memory in self._memory.items())

    def _received(self, group: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once it is in its place. Memory that is a slice of something wider takes a detour."""
        detours: dict[str, torch.Tensor] = {}

        def blocks() -> Iterator[tuple[str, torch.Tensor]]:
            for name, memory in self._memory.items():
                if memory.is_contiguous():
                    yield name, memory
                else:
                    detours[name] = torch.empty_like(memory, memory_format=torch.contiguous_format)
                    yield name, detours[name]

        for name in passed(group.recv, SENDER, blocks()):
            memory = self._memory[name]
            if (detour := detours.pop(name, None)) is not None:
                memory.copy_(detour)
            yield name, memory


def _together(meeting: Meeting, rank: int, device: torch.device, move: Callable[[Any], None], what: str) -> None:
    """Have `move` do its part with a group of two. Raises WeightsError.

    The group ends with this call, in its thread: NCCL's takes its time, and an error that held it, by the frames it has
    come through, would have it end wherever that error is forgotten, on the event loop say.
    """
    try:
        _moved(meeting, rank, device, move)
    except (RuntimeError, WeightsError) as error:
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{what}: {_first_line(error)}") from error


def _moved(meeting: Meeting, rank: int, device: torch.device, move: Callable[[Any], None]) -> None:
    """When it fails the group's connections are cut at once: what is on its way must not be written any more into
    memory that the next source fills."""
    with beside(device, behind=True, purpose="transfer"):
        group = meeting.group(rank, device)
        try:
            with meeting.cutting(group):
                move(group)
        except BaseException:
            group.abort()
            raise


def reserve(slots: Mapping[str, Slot]) -> None:
    """Touch the memory of a model without weights, so that the first load need not wait for fresh pages.

    Raises RuntimeError or MemoryError where there is not enough.
    """
    for storage, size in _storages(slots):
        if storage.device.type == "cpu":
            _advise_huge_pages(storage.data_ptr(), size)
        storage.fill_(0)


def _storages(slots: Mapping[str, Slot]) -> list[tuple[torch.UntypedStorage, int]]:
    """Each once, since several tensors may lie in one, with the bytes that those need, which it may not have yet; the
    largest first: where there is no room for it, the smaller ones have not yet taken what the engine itself needs to
    say so."""
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for memory in (slot.memory for slot in slots.values()):
        storage = memory.untyped_storage()
        known = found.get(storage._cdata, (storage, 0))  # by its identity: all that are empty have the same address
        found[storage._cdata] = (storage, max(known[1], _end(memory)))
    return sorted(found.values(), key=lambda each: each[1], reverse=True)


def _end(memory: torch.Tensor) -> int:
    """Where this tensor ends in its storage, in bytes."""
    steps = zip(memory.shape, memory.stride(), strict=True)
    return (memory.storage_offset() + sum((size - 1) * stride for size, stride in steps) + 1) * memory.element_size()


def _advise_huge_pages(address: int, size: int) -> None:
    """Fresh memory is handed out page by page at first touch: 2 MB at a time costs a fraction of 4 kB at a time.

    Only advice: where the kernel does not take it (or is no Linux), nothing is lost.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    if (length := address + size - begin) > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


def _algorithm(name: str, expected: str) -> str:
    try:
        return algorithm_of(expected)
    except ValueError as error:
        raise WeightsError(f"tensor {name}: {error}") from error


def _damaged(name: str) -> WeightsError:
    return WeightsError(f"tensor {name} of the copy in host memory is damaged")


def _digests(shared: Path) -> dict[str, str]:
    try:
        with safe_open(shared / WHOLE, framework="pt") as file:
            return digests_of(file.metadata())
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{shared / WHOLE}: {error}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
