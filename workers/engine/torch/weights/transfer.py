"""A model's weights in memory: loading, checking, and transfers between engines over torch.distributed.

Two connected engines (`meeting`) form a group of two, separate from any group that the model uses: gloo on CPUs, NCCL
between CUDA devices, gloo through host memory on one CUDA device (`host_group`). The sender keeps serving, since its
tensors are only read. Every tensor has a digest (`digest`), which the receiver checks. Tensors are sent in pieces
(`pieces`), so that a short timeout detects a peer that was killed, which may not close its connection.
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

from workers.engine.torch.streams import beside
from workers.engine.torch.weights.digest import algorithm_of, digest, native
from workers.engine.torch.weights.files import Slot, WeightsError, fill, opened
from workers.engine.torch.weights.meeting import RECEIVER, SENDER, Meeting
from workers.engine.torch.weights.pieces import IN_FLIGHT_BYTES, UNPACED, PiecePace, Unpaced, passed, patience
from workers.engine.weights.host_copy import WHOLE, CopyEntry, digests_of
from workers.engine.weights.turns import LoadTurn, LoadTurns


class TensorInfo(NamedTuple):
    """One tensor in an engine's memory (of several ranks, the part of one)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


class WeightMemory:
    """The memory of a model's slots. `present`: it holds complete, checked weights; `keep_room`: it is never released
    (see `reserve`). `ranked`: the model has several ranks, and another one may still fail to load, so a copy in host
    memory stays until it is dropped explicitly."""

    def __init__(
        self, slots: Mapping[str, Slot], *, present: bool, keep_room: bool = False, ranked: bool = False
    ) -> None:
        self.present = present
        self._keep_room, self._ranked = keep_room, ranked
        self._memory = {name: slots[name].memory for name in sorted(slots)}
        self._slots = slots
        self._storages = _storages(slots)
        self.digested = 0  # bytes done by the newest computation of digests
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
        """Copy the weights to host memory, before a release."""
        digests = {info.name: info.digest for info in self.manifest()}
        self._host = None  # drops an older copy first, since memory may not suffice for two
        with beside(self._device, behind=True, purpose="copies"):
            self._host = {name: memory.detach().to("cpu", copy=True) for name, memory in self._memory.items()}
        self._host_digests = digests

    def entries(self) -> list[CopyEntry]:
        """The entries of a copy for other engines, in the order of `blocks`."""
        sizes = {name: memory.nbytes for name, memory in self._memory.items()}
        return [CopyEntry(each.name, each.dtype, each.shape, sizes[each.name], each.digest) for each in self.manifest()]

    def blocks(self) -> Iterator[memoryview]:
        """The bytes of each tensor, on the host."""
        for memory in self._memory.values():
            with beside(self._device, behind=True, purpose="copies"):
                flat = memory.detach().cpu().contiguous()
            yield memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")

    def release(self) -> None:
        """Release the memory (unless `keep_room`). Tensors keep their shapes without content."""
        self.present = False
        if self._keep_room:
            return
        for storage, _ in self._storages:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep the memory, which other engines of this device need

    def _make_room(self) -> None:
        """Allocate the memory. Raises RuntimeError (out of memory)."""
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)
                if storage.device.type == "cpu":
                    _advise_huge_pages(storage.data_ptr(), size)

    def manifest(self) -> list[TensorInfo]:
        """The tensors with their digests. Computed once, since weights do not change while they are present; concurrent
        callers wait, so call it in a thread. Raises WeightsError."""
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
            raise WeightsError("the weights were loaded again while their digests were computed")
        self._digests = found
        return found

    def _require(self) -> None:
        if not self.present:
            raise WeightsError("this engine holds no weights")

    # ---- the three sources -----------------------------------------------------------------------------------------

    def load_disk(self, folder: Path) -> int:
        """Load from the disk; returns the bytes read. Raises WeightsError; then no weights are present."""
        self.present = False
        checkpoint = opened(self._slots, folder)  # before memory is allocated, which may drop the copy in host memory
        self._begin()
        read = fill(self._slots, checkpoint)
        self._came()
        return read

    def load_host(self, shared: Path | None = None, turns: LoadTurns | None = None) -> int:
        """Load from the copy that this engine kept, or else from the one in the folder that this host's engines share.
        `turns`: whether the next tensor may be read.

        Raises WeightsError, and RuntimeError if there is not enough memory; then no weights are present. A damaged copy
        of this engine is dropped; after a lack of memory it stays for the next attempt.
        """
        if self._host is not None:
            self._begin(from_copy=True)
            try:
                return self._copied(self._host.__getitem__, self._host_digests, turns or UNPACED)
            except WeightsError:
                self.drop_host_copy()
                raise
        if shared is None:
            raise WeightsError("there is no copy in host memory")
        checkpoint = opened(self._slots, shared)
        self._begin()
        return self._copied(checkpoint.read, _digests(shared), turns or UNPACED)

    def _copied(self, read: Callable[[str], torch.Tensor], digests: Mapping[str, str], pace: PiecePace) -> int:
        """Copy each tensor and check its digest, before or after the copy, on the device that the algorithm is for."""
        own = native(self._device)
        for number, (name, memory) in enumerate(self._memory.items(), 1):
            pace.next(number)
            expected, copy = digests.get(name, ""), read(name)
            if (algorithm := _algorithm(name, expected)) != own and digest(copy, algorithm) != expected:
                raise _damaged(name)
            memory.copy_(copy)
            if algorithm == own and digest(memory) != expected:
                raise _damaged(name)
            pace.moved(memory.nbytes)
        if all(_algorithm(name, expected) == own for name, expected in digests.items()):
            self._digests = dict(digests)  # digests of another algorithm cannot be sent to a receiver
        self._came()
        return self.nbytes

    def receive(self, meeting: Meeting, theirs: Sequence[TensorInfo], turn: LoadTurn | None = None) -> int:
        """Receive from the engine with this manifest; returns the bytes. `turn` gets what the source says of its turns.
        Raises WeightsError; then no weights are present."""
        self.check(theirs)
        self._begin()
        wanted = {info.name: info.digest for info in theirs}

        def take(group: Any) -> None:
            for name, memory in self._received(group, _pace_of(meeting, turn or LoadTurn())):
                if digest(memory) != wanted[name]:
                    raise WeightsError(f"tensor {name} arrived damaged")
            meeting.landed()

        _together(meeting, RECEIVER, self._device, take, "the transfer failed")
        self._digests = wanted
        self._came()
        return self.nbytes

    def check(self, theirs: Sequence[TensorInfo]) -> None:
        """Raises WeightsError naming the first tensor that differs."""
        found = {info.name: info for info in theirs}
        for name, memory in self._memory.items():
            info = found.pop(name, None)
            if info is None:
                raise WeightsError(f"the source lacks tensor {name}")
            if (info.dtype, tuple(info.shape)) != (str(memory.dtype), tuple(memory.shape)):
                ours = f"{list(memory.shape)} {memory.dtype}"
                raise WeightsError(f"tensor {name} is {list(info.shape)} {info.dtype} at the source, {ours} here")
            if (algorithm := _algorithm(name, info.digest)) != native(memory.device):
                raise WeightsError(f"the source has {algorithm} digests, this engine has {native(memory.device)}")
        if found:
            raise WeightsError(f"the source has another model: tensor {min(found)} does not exist here")

    def _begin(self, *, from_copy: bool = False) -> None:
        """Allocate the memory for a load. If host memory is short, a copy there that is not the source is dropped.
        Raises RuntimeError (out of memory)."""
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
        """The load has succeeded. A copy in host memory is no longer needed."""
        self.present = True
        if not self._ranked:
            self.drop_host_copy()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._memory.values())).device

    # ---- the wire --------------------------------------------------------------------------------------------------

    def send(self, meeting: Meeting, turns: LoadTurns | None = None) -> int:
        """Send to the connected engine; returns the bytes. `turns`: whether the next piece may be sent; the meeting
        `paces` then. Raises WeightsError."""
        self._require()

        largest = max(memory.nbytes for memory in self._memory.values())

        def give(group: Any) -> None:
            for _ in passed(group.send, RECEIVER, self._blocks(), turns or UNPACED):
                pass
            meeting.wait_landed(IN_FLIGHT_BYTES + largest)  # the bytes in flight, and the digest of a tensor

        if turns is not None:
            turns.told = meeting.tell_turn
        _together(meeting, SENDER, self._device, give, "sending failed")
        return self.nbytes

    def _blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, memory.contiguous()) for name, memory in self._memory.items())

    def _received(self, group: Any, pace: PiecePace) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once it was received. A slice of a wider tensor is received into a contiguous buffer first."""
        detours: dict[str, torch.Tensor] = {}

        def blocks() -> Iterator[tuple[str, torch.Tensor]]:
            for name, memory in self._memory.items():
                if memory.is_contiguous():
                    yield name, memory
                else:
                    detours[name] = torch.empty_like(memory, memory_format=torch.contiguous_format)
                    yield name, detours[name]

        for name in passed(group.recv, SENDER, blocks(), pace):
            memory = self._memory[name]
            if (detour := detours.pop(name, None)) is not None:
                memory.copy_(detour)
            yield name, memory


class _Announced(Unpaced):
    """The pace of a source that announces each piece, as its receiver sees it."""

    def __init__(self, meeting: Meeting, piece_bytes: int, turn: LoadTurn) -> None:
        self._meeting, self._piece_bytes, self._turn = meeting, piece_bytes, turn

    @property
    def piece_bytes(self) -> int:
        return self._piece_bytes

    def next(self, number: int) -> None:
        self._meeting.await_turn(number, self._turn, patience(IN_FLIGHT_BYTES))


def _pace_of(meeting: Meeting, turn: LoadTurn) -> PiecePace:
    try:
        given = meeting.piece_bytes
    except ValueError:
        given = 0
    if given is None:
        return UNPACED
    if given <= 0:
        raise WeightsError("the source announced pieces without a size")
    return _Announced(meeting, given, turn)


def _together(meeting: Meeting, rank: int, device: torch.device, move: Callable[[Any], None], what: str) -> None:
    """Call `move` with a group of two. Raises WeightsError.

    The group is destroyed within this call, in its thread, since destroying an NCCL group takes long. An error that
    referenced it through its frames would destroy it wherever the error is dropped, for instance on the event loop.
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
    """Call `move`. If it fails, the group is aborted at once, so that late data is not written into memory that the
    next source fills."""
    with beside(device, behind=True, purpose="transfer"):
        group = meeting.group(rank, device)
        try:
            with meeting.cutting(group):
                move(group)
        except BaseException:
            group.abort()
            raise


def reserve(slots: Mapping[str, Slot]) -> None:
    """Touch the memory of a model without weights, so that the first load does not wait for page faults.

    Raises RuntimeError or MemoryError if there is not enough memory.
    """
    for storage, size in _storages(slots):
        if storage.device.type == "cpu":
            _advise_huge_pages(storage.data_ptr(), size)
        storage.fill_(0)


def _storages(slots: Mapping[str, Slot]) -> list[tuple[torch.UntypedStorage, int]]:
    """The storages of all slots, each once (tensors may share one), with the bytes that its tensors need. The largest
    comes first: if it does not fit, the smaller ones have not taken the memory that the engine needs to report that."""
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for memory in (slot.memory for slot in slots.values()):
        storage = memory.untyped_storage()
        known = found.get(storage._cdata, (storage, 0))  # by identity, since all empty storages have the same address
        found[storage._cdata] = (storage, max(known[1], _end(memory)))
    return sorted(found.values(), key=lambda each: each[1], reverse=True)


def _end(memory: torch.Tensor) -> int:
    """The end of this tensor in its storage, in bytes."""
    steps = zip(memory.shape, memory.stride(), strict=True)
    return (memory.storage_offset() + sum((size - 1) * stride for size, stride in steps) + 1) * memory.element_size()


def _advise_huge_pages(address: int, size: int) -> None:
    """Advise the kernel to use pages of 2 MB, whose first touch is much faster than that of 4 kB pages.

    It is only advice, which the kernel may ignore; it does nothing except on Linux.
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
