"""The order of work on emulated devices: streams, events, and who may touch which bytes after whom.

Nothing is asynchronous here: an operator has run when it returns. But each is counted in the stream that it was queued
on, and each stream knows how much of the others it comes behind: by `wait_stream`, by events, by what the host has
waited for before it queued. An access to bytes whose last writer (or, to write, last reader) it does not come behind
would be a race on a device, and raises here, always, whoever would have been first. This is what torch's own
`torch.cuda._sanitizer` does with a device.

More lenient than a device in one way: all threads count as one host, so what one has waited for all have.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Clock = dict["EmulatedStream", int]


class RaceError(AssertionError):
    """Work that no device was told to do in this order."""


class Access(NamedTuple):
    stream: EmulatedStream
    tick: int
    what: str


class EmulatedStream:
    """Its `clock`: of each stream the last work that what is queued here next comes behind."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.device = device if device is not None else HOST.device
        self.priority = priority
        self.clock: Clock = {}

    def queued(self, what: str) -> Access:
        """One more operator; it comes behind all that the host has waited for."""
        _merge(self.clock, HOST.clock)
        self.clock[self] = self.clock.get(self, 0) + 1
        return Access(self, self.clock[self], what)

    def knows(self, access: Access) -> bool:
        return max(self.clock.get(access.stream, 0), HOST.clock.get(access.stream, 0)) >= access.tick

    def wait_stream(self, other: EmulatedStream) -> None:
        _merge(self.clock, other.clock)

    def synchronize(self) -> None:
        HOST.waited_for(self.clock)

    def query(self) -> bool:
        """Not done as long as nobody has waited for it."""
        return all(HOST.clock.get(stream, 0) >= tick for stream, tick in list(self.clock.items()))


class EmulatedEvent:
    def __init__(self) -> None:
        self._clock: Clock = {}

    def record(self, stream: EmulatedStream | None = None) -> None:
        self._clock = dict((stream or current_stream()).clock)

    def query(self) -> bool:
        """Done, always; and who knows that may build on it."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        HOST.waited_for(self._clock)


class Host(threading.local):
    """Each thread begins on the first device, in the line that all of torch's work has there."""

    clock: Clock = {}  # noqa: RUF012 - of all threads together
    lines: dict[torch.device, EmulatedStream] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.streams: dict[torch.device, EmulatedStream] = {}

    def waited_for(self, clock: Clock) -> None:
        with _LOCK:
            _merge(self.clock, clock)


_LOCK = threading.Lock()
HOST = Host()


def _merge(into: Clock, other: Clock) -> None:
    for stream, tick in list(other.items()):
        into[stream] = max(tick, into.get(stream, 0))


def current_stream(device: torch.device | None = None) -> EmulatedStream:
    where = HOST.device if device is None else device
    if (own := HOST.streams.get(where)) is not None:
        return own
    with _LOCK:
        return HOST.lines.setdefault(where, EmulatedStream(where))


@contextmanager
def on_stream(stream: EmulatedStream) -> Iterator[None]:
    """As `torch.cuda.stream`: its device is the current one meanwhile."""
    device, before = HOST.device, HOST.streams.get(stream.device)
    HOST.device, HOST.streams[stream.device] = stream.device, stream
    try:
        yield
    finally:
        HOST.device = device
        if before is None:
            del HOST.streams[stream.device]
        else:
            HOST.streams[stream.device] = before


def synchronize(device: torch.device | None = None) -> None:
    """All that is queued on a device. Streams that nobody else waits for are not known here, and need not be."""
    current_stream(device).synchronize()


class Ledger:
    """Who wrote and read the bytes of one storage last. `fine`: byte by byte, else all of it together."""

    faults: list[str] = []  # noqa: RUF012 - of one emulation: what goes has no caller to raise to

    def __init__(self, storage: torch.UntypedStorage, made_on: EmulatedStream, *, fine: bool) -> None:
        self.made_on, self._faults = made_on, Ledger.faults
        self._writing = threading.Lock()
        self._last: dict[EmulatedStream, Access] = {}
        self._accesses: list[Access] = []
        self._fine, self._size = fine, -1
        self._sized(storage.nbytes())

    def _sized(self, nbytes: int) -> None:
        if nbytes != self._size:
            self._size = nbytes
            shape = nbytes if self._fine else 1
            self._written, self._read = (torch.full((shape,), -1, dtype=torch.int32) for _ in "wr")

    def touched(self, view: torch.Tensor, access: Access, writes: bool, part: Any = None) -> None:
        """By one operator, through this view: the `part` of it with that index. Raises RaceError."""
        with self._writing:
            self._sized(view.untyped_storage().nbytes())
            where = self._places(view, part)
            self._after(self._written[where], access)
            if writes:
                self._after(self._read[where], access)
            (self._written if writes else self._read)[where] = len(self._accesses)
            self._accesses.append(access)
            self._last[access.stream] = access

    def _places(self, view: torch.Tensor, part: Any) -> torch.Tensor:
        """Places of the first bytes of its elements."""
        if not self._fine:
            return torch.zeros(1, dtype=torch.long)
        size = view.element_size()
        every = torch.arange(self._size).as_strided(
            view.shape, [step * size for step in view.stride()], view.storage_offset() * size
        )
        return (every if part is None else every[part]).reshape(-1)

    def _after(self, places: torch.Tensor, access: Access) -> None:
        for number in places.unique().tolist():
            if number >= 0 and not access.stream.knows(before := self._accesses[number]):
                raise RaceError(f"{access.what} does not come behind {before.what}, which is in another stream")

    def freed(self) -> str:
        """Memory goes back to the stream it was made on, which may use it at once. What is wrong with that."""
        late = [each for each in self._last.values() if not self.made_on.knows(each)]
        self._last.clear()
        return f"given back while {late[0].what} may still use it" if late else ""

    def __del__(self) -> None:
        if fault := self.freed():
            self._faults.append(fault)


def begin() -> None:
    """Nothing has been queued."""
    HOST.clock.clear()
    HOST.lines.clear()
    Ledger.faults = []  # what is left of an earlier emulation says its own elsewhere
