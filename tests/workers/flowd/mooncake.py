"""Two ends of a transfer over Mooncake: the library itself where it is installed, and a fake that demands no less."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import pytest

from workers.flowd.transports import Region, register

# `mooncake.engine.TransferEngine` refuses with it whatever is wrong, and raises nothing.
REFUSED = -1


class FakeMooncake:
    """As `mooncake.engine.TransferEngine`: lists of one length, memory that is registered at its own end. Bytes are
    really copied. Memory here has to be registered too, as RDMA demands; the library does not check that over TCP."""

    def __init__(self, network: dict[str, FakeMooncake]) -> None:
        self.session = f"10.0.0.{len(network) + 1}:12001"
        self._network, self._registered = network, list[range]()
        network[self.session] = self

    def batch_register_memory(self, buffer_addresses: list[int], capacities: list[int]) -> int:
        if len(buffer_addresses) != len(capacities) or any(size <= 0 for size in capacities):
            return REFUSED
        self._registered += [range(at, at + size) for at, size in zip(buffer_addresses, capacities, strict=True)]
        return 0

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        there = self._network.get(target_hostname)
        if there is None or not len(buffers) == len(peer_buffer_addresses) == len(lengths):
            return REFUSED
        copies = list(zip(buffers, peer_buffer_addresses, lengths, strict=True))
        if not all(self._holds(here, size) and there._holds(at, size) for here, at, size in copies):
            return REFUSED
        for here, at, size in copies:
            ctypes.memmove(at, here, size)
        return 0

    def _holds(self, at: int, size: int) -> bool:
        return size > 0 and any(at in known and at + size - 1 in known for known in self._registered)


class Ends(NamedTuple):
    """`session`: that of `there`."""

    here: Any
    there: Any
    session: str


def fake_ends() -> Ends:
    network: dict[str, FakeMooncake] = {}
    here, there = FakeMooncake(network), FakeMooncake(network)
    return Ends(here, there, there.session)


def real_ends() -> Ends:
    """Over TCP on this machine. Skips where the library is not installed (docs/how-to/order-transfers.md)."""
    made = []
    for _ in range(2):
        engine = pytest.importorskip("mooncake.engine", exc_type=ImportError).TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        made.append(engine)
    return Ends(*made, f"127.0.0.1:{made[1].get_rpc_port()}")


class Memory:
    """Two buffers at either end, of which the second continues the first."""

    def __init__(self, sizes: tuple[int, ...] = (1000, 500)) -> None:
        self.here = [ctypes.create_string_buffer(bytes(1 + 7 * at % 251 for at in range(size)), size) for size in sizes]
        self.there = [ctypes.create_string_buffer(size) for size in sizes]
        self.regions = [
            Region(ctypes.addressof(one), ctypes.addressof(other), len(one))
            for one, other in zip(self.here, self.there, strict=True)
        ]

    def registered_in(self, ends: Ends) -> None:
        register(ends.here, [(region.here, region.size) for region in self.regions])
        register(ends.there, [(region.there, region.size) for region in self.regions])

    @property
    def moved(self) -> int:
        """Bytes at the receiver that are those of the sender, from the first on."""
        sent, got = (b"".join(each.raw for each in end) for end in (self.here, self.there))
        return next((at for at, (one, other) in enumerate(zip(sent, got, strict=True)) if one != other), len(sent))
