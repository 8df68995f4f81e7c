"""Weights go to engines of the fleet only: whoever has no token and finds an open port of a transfer gets no bytes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from psutil import CONN_LISTEN, Process

from tests.workers.engine.client import post_once
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.engine.torch.bench import folder
from tests.workers.engine.torch.meetings import HOST, TOKEN, memory, met
from workers.engine.kv.unproven_connections import MOST_FROM_ADDRESS
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.meeting import RECEIVER, SENDER, Meeting, awaited, meet
from workers.engine.torch.weights.pieces import patience

pytestmark = [pytest.mark.torch, pytest.mark.thorough]
LOADS = 4
COMMON = ("--executor", "torch", "--threads", "1", "--kv-cache-gib", "0.01", "--profile", "constant:5ms")


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    options = (*COMMON, "--model", str(folder()), "--shutdown-timeout", "0", "--kv-timeout", "4")
    return {"source": options, "warm": (*options, "--weights", "absent")}


def listening(process: Process) -> dict[int, str]:
    """Address by port."""
    found = process.net_connections("tcp")
    return {each.laddr.port: each.laddr.ip for each in found if each.status == CONN_LISTEN}


class Thief(Thread):
    """Joins as the receiver at the first port that the engine opens for a load."""

    def __init__(self, engine: EngineProcess) -> None:
        super().__init__()
        self.process = Process(engine.process.pid)
        self.known = listening(self.process)
        self.opened: dict[int, str] = {}
        self.got: torch.Tensor | None = None

    def run(self) -> None:
        ends_at = time.monotonic() + 5.0
        while not self.opened and time.monotonic() < ends_at:
            self.opened = {port: ip for port, ip in listening(self.process).items() if port not in self.known}
        for port in self.opened:
            try:
                store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=1))
                group = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=1))
                tensor = torch.zeros(500 * 64 * 4, dtype=torch.uint8)
                group.recv([tensor], 0, 0).wait()
                self.got = tensor
            except RuntimeError:
                continue


def load(engine: EngineProcess, *sources: dict[str, str]) -> tuple[int, dict]:
    body = {**FLEET, "sources": list(sources)}
    answer = post_once(engine.url, "/weights/load", body)
    return answer.status_code, answer.json()


def test_another_program_at_the_port_of_a_transfer_gets_nothing_and_does_not_disturb_it(engines):
    seen = 0
    for _ in range(LOADS):
        post_once(engines["warm"].url, "/sleep?level=2", FLEET)
        thief = Thief(engines["warm"])
        thief.start()
        status, said = load(engines["warm"], {"kind": "engine", "url": engines["source"].url})
        thief.join()
        assert thief.got is None
        assert (status, said["state"]) == (200, "present"), said
        assert set(thief.opened.values()) <= {"127.0.0.1"}  # where it is reached, not on all addresses
        seen += bool(thief.opened)
    assert seen


# ---- without engines ------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def stolen(meeting: Meeting, rank: int, proof: bytes) -> bytes:
    """What somebody gets who is connected as torch connects, but knows no token: the first bytes of weights."""
    group = meeting._made(rank, CPU)
    peer = RECEIVER if rank == SENDER else SENDER
    try:
        loot = torch.zeros(32, dtype=torch.uint8)
        if rank == SENDER:
            group.recv([loot], peer, 0).wait(patience(0))  # what the receiver shows
        group.send([torch.tensor(list(proof), dtype=torch.uint8)], peer, 0).wait(patience(0))
        if rank == RECEIVER:
            group.recv([loot], peer, 0).wait(patience(0))
            group.recv([loot], peer, 1).wait(patience(0))
    except RuntimeError:
        return b""
    return bytes(loot.tolist())


async def test_another_program_in_place_of_the_receiver_gets_no_bytes():
    async with met() as (source, thief):
        loot = asyncio.create_task(asyncio.to_thread(stolen, thief, RECEIVER, bytes(32)))
        with pytest.raises(WeightsError, match="another program joined the transfer"):
            await asyncio.to_thread(memory().send, source)
        assert await loot == b""


async def test_another_program_in_place_of_the_source_gives_no_bytes():
    receiver, theirs = memory(), memory().manifest()
    async with met() as (thief, meeting):
        work = asyncio.create_task(asyncio.to_thread(stolen, thief, SENDER, bytes(32)))
        with pytest.raises(WeightsError, match="another program joined the transfer"):
            await asyncio.to_thread(receiver.receive, meeting, theirs)
        await work
    assert not receiver.present


async def test_the_receivers_own_proof_is_not_the_sources():
    """A stranger who sends back what it was shown has shown nothing."""
    receiver, theirs = memory(), memory().manifest()
    async with met() as (thief, meeting):
        work = asyncio.create_task(asyncio.to_thread(stolen, thief, SENDER, meeting._proof("receives")))
        with pytest.raises(WeightsError, match="another program joined the transfer"):
            await asyncio.to_thread(receiver.receive, meeting, theirs)
        await work


async def test_strangers_hold_a_bounded_number_of_connections_and_the_source_is_still_met():
    async with awaited(HOST, TOKEN, 5.0) as waiting:
        opened = [await asyncio.open_connection(HOST, waiting.port) for _ in range(MOST_FROM_ADDRESS + 20)]
        closed = 0
        for reader, _ in opened[:20]:  # the oldest; each has been sent a challenge
            with contextlib.suppress(ConnectionError):
                while await asyncio.wait_for(reader.read(4096), 2.0):
                    continue
            closed += 1
        source = await meet(HOST, waiting.port, waiting.nonce, TOKEN, HOST, 5.0)
        await source.close()
        await (await waiting.met(5.0)).close()
        for _, writer in opened:
            writer.close()
    assert closed == 20


async def test_who_does_not_know_the_token_is_sent_away_and_the_source_is_still_awaited():
    async with awaited(HOST, TOKEN, 5.0) as waiting:
        for _ in range(3):
            with pytest.raises(WeightsError, match="does not know the fleet's token"):
                await meet(HOST, waiting.port, waiting.nonce, "guess", HOST, 5.0)
        source = await meet(HOST, waiting.port, waiting.nonce, TOKEN, HOST, 5.0)
        source.set("key", b"value")
        there = await waiting.met(5.0)
        assert await asyncio.to_thread(there.get, "key") == b"value"
        await source.close()
        with pytest.raises(RuntimeError, match="disconnected"):
            await asyncio.to_thread(there.get, "other")


async def test_all_that_a_transfer_opens_is_at_the_advertised_host():
    before = listening(Process())
    async with met("127.0.0.2") as (source, receiver):
        groups = await asyncio.gather(
            asyncio.to_thread(source.group, SENDER, CPU), asyncio.to_thread(receiver.group, RECEIVER, CPU)
        )
        opened = {port: ip for port, ip in listening(Process()).items() if port not in before}
        assert len(opened) == 3  # where they met, and torch's two
        assert set(opened.values()) == {"127.0.0.2"}
        assert len(groups) == 2


async def test_a_host_that_is_not_this_machines_is_named():
    with pytest.raises(WeightsError, match=r"at 203\.0\.113\.9 \(--advertise-host\)"):
        async with awaited("203.0.113.9", TOKEN, 5.0):
            pass


async def test_a_source_that_never_comes_is_given_up():
    async with awaited(HOST, TOKEN, 5.0) as waiting:
        with pytest.raises(WeightsError, match="did not connect within"):
            await waiting.met(0.1)
