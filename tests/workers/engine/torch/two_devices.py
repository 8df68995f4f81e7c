"""Two emulated CUDA devices on a machine that has none: no GPU, but the book-keeping of one.

Within `emulated()` a tensor on `cuda:0` or `cuda:1` lies in the host's memory and is computed with there. What it has
of a device is its name, which it keeps in everything that is made of it, and the rules that torch has for tensors of
several devices: an operator that mixes them raises as it would there, and so does every way for the host to look at a
device's memory but a copy. The order of work is kept book of too (`torch_emulated_order`). So what a device would
refuse, or might do in another order, is seen; what it would compute, how fast, and in how much memory is not.

Only for a build of torch without CUDA: in one with it these kernels would take the place of the real ones.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from tests.workers.engine.torch import emulated_order as order
from tests.workers.engine.torch.emulated_order import Access, EmulatedStream, Ledger, RaceError
from workers.engine.torch.weights import host_group

DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))
FIRST, SECOND = DEVICES
CPU = torch.device("cpu")
aten = torch.ops.aten
MOVES = {aten.copy_, aten._to_copy}
INDEXED = {aten.index, aten.index_put_, aten._index_put_impl_}
FACTORIES = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step")


class MixedDevicesError(RuntimeError):
    """As torch's "Expected all tensors to be on the same device"."""


class HostAccessError(RuntimeError):
    """The host would read or write a device's memory through a pointer."""


class EmulatedTensor(torch.Tensor):
    """`host`: the same memory as what it is, a tensor on the CPU; `place`: where it says it is."""

    host: torch.Tensor
    place: torch.device
    ledger: Ledger
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: torch.Tensor, place: torch.device, ledger: Ledger | None = None) -> EmulatedTensor:
        self = torch.Tensor._make_subclass(cls, host, False, dispatch_device=True, device_for_backend_keys=place)
        self.host, self.place = host, place
        stream = order.current_stream(place)
        self.ledger = ledger or Ledger(host.untyped_storage(), stream, fine=False)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].place
        return _run(func, args, dict(kwargs or {}))

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> EmulatedTensor:
        """Torch's own, like its way to index, asks for a device on the way here."""
        found: EmulatedTensor = _run(aten.copy_.default, (self, source), {})
        return found

    def __getitem__(self, where: Any) -> EmulatedTensor:
        if not _advanced(where):
            return EmulatedTensor(self.host[where], self.place, self.ledger)
        access = self._indexed("index", where, None)
        found = EmulatedTensor(self.host[tree_map(_host, where)], self.place)
        found.ledger.touched(found.host, access, True)
        return found

    def __setitem__(self, where: Any, value: Any) -> None:
        if not _advanced(where) and isinstance(value, torch.Tensor):
            self[where].copy_(value)
            return
        self._indexed("index_put_", where, value)
        self.host[tree_map(_host, where)] = _host(value)

    def _indexed(self, what: str, where: Any, value: Any) -> Access:
        """torch's own would ask for the device. Indices may be on the host, and so may one number that is written."""
        others = [each for each in tree_leaves((where, value)) if isinstance(each, torch.Tensor)]
        allowed = {self.place, CPU} if not isinstance(value, torch.Tensor) or value.dim() == 0 else {self.place}
        if not {_place_of(each) for each in tree_leaves(where) if isinstance(each, torch.Tensor)} <= {self.place, CPU}:
            raise _mixed(what, [self, *others])
        if isinstance(value, torch.Tensor) and _place_of(value) not in allowed:
            raise _mixed(what, [self, *others])
        access = order.current_stream(self.place).queued(what)
        for each in others:
            if isinstance(each, EmulatedTensor):
                each.ledger.touched(each.host, access, False)
        self.ledger.touched(self.host, access, what == "index_put_", tree_map(_host, where))
        return access

    def untyped_storage(self) -> Any:
        return EmulatedStorage(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.host!r} on {self.place}, emulated"

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        raise HostAccessError("the address of a tensor on a device means nothing to the host")


class EmulatedStorage:
    """As far as the engine uses one."""

    def __init__(self, of: EmulatedTensor) -> None:
        self._of, self._host = of, of.host.untyped_storage()
        self.device, self._cdata = of.place, self._host._cdata

    def nbytes(self) -> int:
        return self._host.nbytes()

    def resize_(self, nbytes: int) -> None:
        """What it held is given back, and more is taken for the stream that asks."""
        if fault := self._of.ledger.freed():
            raise RaceError(fault)
        self._of.ledger.made_on = order.current_stream(self.device)
        self._host.resize_(nbytes)

    def fill_(self, value: int) -> None:
        access = order.current_stream(self.device).queued("fill_")
        self._of.ledger.touched(torch.empty(0, dtype=torch.uint8).set_(self._host), access, True)
        self._host.fill_(value)

    def data_ptr(self) -> int:
        return self._of.data_ptr()


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator, on the host, in the name of a device."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    place = _place(func, args, tensors)
    target = kwargs.get("device") or place
    if "device" in kwargs:
        kwargs["device"] = CPU
    stream = order.current_stream(place)
    others = {target, *map(_place_of, tensors)} - {place, CPU}  # of a copy between two devices: it waits for both
    for each in others:
        stream.wait_stream(order.current_stream(each))
    access = stream.queued(str(func))
    written = {id(each) for each in _written(func, args, kwargs)}
    known = {id(each.host): each for each in tensors if isinstance(each, EmulatedTensor)}
    ledgers = {each.host.untyped_storage()._cdata: each.ledger for each in known.values()}
    found = func(*tree_map(_host, args), **tree_map(_host, kwargs))
    made = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
    if written or not made or not all(each.untyped_storage()._cdata in ledgers for each in made):  # no mere view
        for tensor in known.values():
            tensor.ledger.touched(tensor.host, access, id(tensor) in written)
    for each in others:
        order.current_stream(each).wait_stream(stream)
    if func is aten._local_scalar_dense.default or (func.overloadpacket in MOVES and _crosses(args, target)):
        access.stream.synchronize()  # from and to memory that is not pinned the host waits

    def labelled(result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or target.type == "cpu":
            return result
        if id(result) in known:
            return known[id(result)]
        ledger = ledgers.get(result.untyped_storage()._cdata)
        new = EmulatedTensor(result, target, ledger)
        if ledger is None:
            new.ledger.touched(new.host, access, True)
        return new

    # What is written in place is returned as it came, also where that is a tensor on the host.
    if func.overloadpacket is aten.copy_:
        return args[0]
    if any(each.host.shape != each.shape for each in known.values()):
        raise NotImplementedError(f"{func} changes the shape of what it writes")
    return tree_map(labelled, found)


def _host(value: Any) -> Any:
    return value.host if isinstance(value, EmulatedTensor) else value


def _crosses(args: Any, target: torch.device) -> bool:
    """From the host to a device or back."""
    if isinstance(args[1] if len(args) > 1 else None, torch.Tensor):
        return CPU in {_place_of(args[0]), _place_of(args[1])}
    return (target.type == "cpu") != (_place_of(args[0]).type == "cpu")


def _place_of(tensor: torch.Tensor) -> torch.device:
    return tensor.place if isinstance(tensor, EmulatedTensor) else CPU


def _place(func: Any, args: Any, tensors: list[torch.Tensor]) -> torch.device:
    """Where the operator runs. Raises MixedDevicesError, by torch's rules."""
    places = {_place_of(each) for each in tensors}
    devices = places - {CPU}
    if func.overloadpacket not in MOVES:
        strangers = [each for each in tensors if _place_of(each) == CPU and not _may_be_on_the_host(func, args, each)]
        if len(devices) > 1 or strangers:
            raise _mixed(func, tensors)
    return _place_of(args[0]) if len(devices) > 1 and _place_of(args[0]) != CPU else next(iter(devices))


def _mixed(what: object, tensors: list[torch.Tensor]) -> MixedDevicesError:
    of = ", ".join(f"{list(each.shape)} on {_place_of(each)}" for each in tensors)
    return MixedDevicesError(f"{what}: expected all tensors to be on the same device, got {of}")


def _advanced(where: Any) -> bool:
    """By tensors or lists: what is found is no view."""
    parts = where if isinstance(where, tuple) else (where,)
    return any(isinstance(each, torch.Tensor | list) for each in parts)


def _may_be_on_the_host(func: Any, args: Any, tensor: torch.Tensor) -> bool:
    """Indices of what lies on a device; single numbers, but not to be written to."""
    if func.overloadpacket in INDEXED:
        return tensor is not args[0] and (any(tensor is each for each in args[1]) or tensor.dim() == 0)
    written = any(tensor is each for each in _written(func, args, {}))
    return tensor.dim() == 0 and torch.Tag.pointwise in func.tags and not written


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return found


# ---- in the place of torch's own ------------------------------------------------------------------------------------


def _factory(name: str) -> Callable[..., EmulatedTensor]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(aten, packet), overload or "default")

    def make(*args: Any, device: torch.device, **kwargs: Any) -> EmulatedTensor:
        place = order.HOST.device if device.index is None else device
        host = operator(*args, device=CPU, **{**kwargs, "pin_memory": None})
        ledger = Ledger(host.untyped_storage(), order.current_stream(place), fine=True)
        return EmulatedTensor(host, place, ledger)

    return make


class EmulatedNccl:
    """In the place of `ProcessGroupNCCL`: gloo, for tensors on devices only."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=store.host)]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(store, rank, size, options)
        self.abort = self._group.abort
        self._streams: dict[torch.device, EmulatedStream] = {}

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> EmulatedWork:
        return self._queued(self._group.send, tensors[0], peer, tag, False)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> EmulatedWork:
        return self._queued(self._group.recv, tensors[0], peer, tag, True)

    def _queued(self, verb: Any, tensor: torch.Tensor, peer: int, tag: int, writes: bool) -> EmulatedWork:
        """In a stream of its own, behind the one it is asked from."""
        if not isinstance(tensor, EmulatedTensor) or not tensor.is_contiguous():
            raise MixedDevicesError("NCCL moves contiguous tensors on a device")
        stream = self._streams.setdefault(tensor.place, EmulatedStream(tensor.place))
        stream.wait_stream(order.current_stream(tensor.place))
        access = stream.queued("NCCL")
        tensor.ledger.touched(tensor.host, access, writes)
        return EmulatedWork(verb([tensor.host], peer, tag), stream)


class EmulatedWork:
    def __init__(self, work: Any, stream: EmulatedStream) -> None:
        self._work, self._stream = work, stream

    def wait(self, timeout: Any) -> None:
        """The stream that asks comes behind it; that the host waits too is not built upon."""
        self._work.wait(timeout)
        order.current_stream(self._stream.device).wait_stream(self._stream)


@contextmanager
def emulated() -> Iterator[None]:
    """For all threads. Raises RaceError at the end for memory that was given back too early."""
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        library.impl(name, _factory(name), "CUDA")
    # `torch.tensor(..., device=...)` copies past the tensors' own dispatch.
    library.impl("copy_", lambda to, source, wait=False: _run(aten.copy_.default, (to, source), {}), "CUDA")
    torch._C._ensureCUDADeviceGuardSet()  # one that guards nothing, as fake tensors use it
    order.begin()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, instead in {
                "_lazy_init": lambda: None,
                "is_available": lambda: True,
                "device_count": lambda: len(DEVICES),
                "get_device_properties": lambda device: SimpleNamespace(uuid=f"emulated {device.index}"),
                "Stream": EmulatedStream,
                "Event": order.EmulatedEvent,
                "stream": order.on_stream,
                "current_stream": order.current_stream,
                "synchronize": order.synchronize,
                "empty_cache": lambda: None,
            }.items():
                patch.setattr(torch.cuda, name, instead)
            patch.setattr(dist, "ProcessGroupNCCL", EmulatedNccl, raising=False)
            patch.setattr(host_group, "pinned", lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
            yield
        gc.collect()
        if Ledger.faults:
            raise RaceError("; ".join(Ledger.faults))
    finally:
        library._destroy()
