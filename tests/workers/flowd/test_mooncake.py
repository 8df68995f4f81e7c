"""Transfers over Mooncake take their turn: with a fake of the library, and with the library where it is installed."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable

import pytest

from tests.workers.flowd.mooncake import Ends, FakeMooncake, Memory, fake_ends, real_ends
from tests.workers.flowd.running import connected, nothing, sending, serving
from workers.flowd.client import SCHEDULED, FlowClient
from workers.flowd.transports import FlowPiece, MooncakeEngine, MooncakeTransport, TransportFailed, paced, register

USED = ("batch_register_memory", "batch_transfer_sync_write")


@pytest.fixture(params=[fake_ends, real_ends], ids=["fake", "real"])
def ends(request: pytest.FixtureRequest) -> Ends:
    made: Callable[[], Ends] = request.param
    return made()


def parameters(of: type, method: str) -> list[str]:
    return list(inspect.signature(getattr(of, method)).parameters)[1:]


@pytest.mark.parametrize("method", USED)
def test_the_fake_and_the_adapter_have_the_librarys_parameters(method: str) -> None:
    assert parameters(FakeMooncake, method) == parameters(MooncakeEngine, method)
    library = pytest.importorskip("mooncake.engine", exc_type=ImportError).TransferEngine
    said = str(getattr(library, method).__doc__).splitlines()[0]  # pybind11 has no other signature
    without_default = re.findall(r"(\w+): [\w.\[\]]+(?=,|\))", said.split("self: ", 1)[1].split(", ", 1)[1])
    assert without_default == parameters(MooncakeEngine, method)


async def test_pieces_are_written_across_regions(ends: Ends) -> None:
    memory = Memory()
    memory.registered_in(ends)
    flow = FlowClient("/nowhere").submit(3, 1500, "host", 1.0)
    await paced(flow, MooncakeTransport(ends.here, ends.session, memory.regions), nothing, piece_bytes=400)
    assert (memory.moved, flow.left) == (1500, 0)


def test_its_errors_are_ours(ends: Ends) -> None:
    memory = Memory()
    transport = MooncakeTransport(ends.here, ends.session, memory.regions)
    register(ends.here, [(region.here, region.size) for region in memory.regions])
    with pytest.raises(TransportFailed, match="code -1"):
        transport.send(FlowPiece(0, 10))  # into memory that the receiver has not registered
    register(ends.there, [(region.there, region.size) for region in memory.regions])
    with pytest.raises(TransportFailed, match=r"could not write to 127\.0\.0\.1:1: code -1"):
        MooncakeTransport(ends.here, "127.0.0.1:1", memory.regions).send(FlowPiece(0, 10))
    with pytest.raises(TransportFailed, match="beyond the 1500 bytes"):
        transport.send(FlowPiece(1400, 200))
    with pytest.raises(TransportFailed, match="could not register 1 regions: code -1"):
        register(ends.here, [(1, 0)])
    assert memory.moved == 0
    transport.send(FlowPiece(0, 1500))
    assert memory.moved == 1500


def test_memory_here_has_to_be_registered_as_rdma_demands() -> None:
    ends, memory = fake_ends(), Memory()
    register(ends.there, [(region.there, region.size) for region in memory.regions])
    with pytest.raises(TransportFailed, match="code -1"):
        MooncakeTransport(ends.here, ends.session, memory.regions).send(FlowPiece(0, 10))


async def test_between_two_pieces_a_transfer_waits_for_a_more_urgent_one(path: str, ends: Ends) -> None:
    memory = Memory()
    memory.registered_in(ends)
    async with serving(path, "earliest_deadline"), connected(path) as client, connected(path) as other:
        async with sending(other):
            flow = client.submit(3, 1500, "host", 25.0)
            moving = asyncio.ensure_future(
                paced(flow, MooncakeTransport(ends.here, ends.session, memory.regions), nothing, piece_bytes=100)
            )
            await asyncio.sleep(0.7)
            assert memory.moved == 0
        await moving
    assert memory.moved == 1500
    assert (flow.reason, flow.held_s > 0.5) == (SCHEDULED, True)
