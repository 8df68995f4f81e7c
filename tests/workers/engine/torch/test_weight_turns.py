"""Weight loads that ask a transfer daemon whether they may move: held, told so, not cut, and never held forever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
import pytest

from tests.waiting import until_on_loop
from tests.workers.engine.client import post
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.engine.torch.bench import folder
from tests.workers.engine.torch.meetings import HOST, memory, met
from tests.workers.engine.torch.test_kv_room import warm_follower
from tests.workers.flowd.running import connected, sending, serving
from workers.engine.torch.weights import pieces as torch_pieces
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.transfer import WeightMemory
from workers.engine.weights.turns import LoadTurn, LoadTurns, load_turns
from workers.flowd import client as flow_client
from workers.flowd.client import MEMORY, FlowClient

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that hears nothing for 0.4 s gives up; who is held says so ten times a second."""
    monkeypatch.setattr(torch_pieces, "PATIENCE_S", 0.4)
    monkeypatch.setattr(torch_pieces, "SLOWEST", 1e12)
    monkeypatch.setattr(flow_client, "STILL_S", 0.1)
    monkeypatch.setattr(LoadTurns, "piece_bytes", 5000)  # the model is tiny


class Move(NamedTuple):
    """A load between two memories in threads. `turn`: as the receiver sees it."""

    sending: asyncio.Task[int]
    receiving: asyncio.Task[int]
    turn: LoadTurn


@asynccontextmanager
async def moving(client: FlowClient | None, receiver: WeightMemory) -> AsyncIterator[Move]:
    sender = memory()
    async with met() as (source, meeting):
        turns = load_turns(client, sender.nbytes, HOST)
        if turns is not None:
            source.paces(turns.piece_bytes)
        turn, manifest = LoadTurn(), sender.manifest()
        give = asyncio.create_task(asyncio.to_thread(sender.send, source, turns))
        take = asyncio.create_task(asyncio.to_thread(receiver.receive, meeting, manifest, turn))
        try:
            yield Move(give, take, turn)
        finally:
            await meeting.close()
            await asyncio.gather(give, take, return_exceptions=True)
            if turns is not None:
                turns.end()


def held(daemon) -> bool:
    """Whether the weight load is submitted and may not send."""
    return any(each["stage"] == 4 and not each["go"] for each in daemon.status()["flows"])


async def test_a_held_load_is_not_cut_and_its_floor_lets_it_go(path):
    """The other transfer never ends, and nobody waits for longer than 0.4 s without a word."""
    receiver = memory(present=False)
    async with serving(path) as daemon, connected(path) as client, connected(path) as other, sending(other):
        async with moving(client, receiver) as move:
            await asyncio.sleep(1.0)
            assert not move.receiving.done()
            (flow,) = [each for each in daemon.status()["flows"] if each["stage"] == 4]
            assert (flow["go"], flow["left_bytes"]) == (False, receiver.nbytes)
            assert await move.receiving == receiver.nbytes
        assert (move.turn.flow, move.turn.level) == ("scheduled", 8)
        assert move.turn.held_s > 1.5, "0.1 s of 2 s are its floor of 5 %"
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 1)
    assert receiver.manifest() == memory().manifest()


async def test_a_load_goes_at_once_on_an_idle_link(path):
    receiver = memory(present=False)
    async with serving(path), connected(path) as client, moving(client, receiver) as move:
        await move.receiving
        assert (move.turn.flow, move.turn.level) == ("scheduled", 8)
        assert move.turn.held_s < 0.5


async def test_without_a_floor_holding_has_an_end(path, monkeypatch):
    monkeypatch.setattr(flow_client, "MOST_HELD_S", 0.8)
    receiver = memory(present=False)
    async with (
        serving(path, "earliest_deadline"),
        connected(path) as client,
        connected(path) as other,
        sending(other),
        moving(client, receiver) as move,
    ):
        await move.receiving
        assert move.turn.flow == "held_too_long"
        assert 0.8 <= move.turn.held_s < 5.0


async def test_a_daemon_that_goes_away_lets_a_held_load_go(path):
    receiver = memory(present=False)
    async with (
        serving(path, "earliest_deadline") as daemon,
        connected(path) as client,
        connected(path) as other,
        sending(other),
        moving(client, receiver) as move,
    ):
        await until_on_loop(lambda: held(daemon))
        assert not move.receiving.done()
        await daemon.close()
        await move.receiving
        assert move.turn.flow == "lost"


async def test_a_receiver_that_goes_away_ends_a_held_load(path):
    async with (
        serving(path, "earliest_deadline") as daemon,
        connected(path) as client,
        connected(path) as other,
        sending(other),
    ):
        async with moving(client, memory(present=False)) as move:
            await until_on_loop(lambda: held(daemon))
            assert not move.sending.done()
        with pytest.raises(WeightsError, match="disconnected"):
            move.sending.result()
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 1)


async def test_a_source_that_announces_nothing_is_given_up(monkeypatch):
    """It hangs, in place of being held."""
    monkeypatch.setattr(LoadTurns, "_tell", lambda self: time.sleep(1.5))
    async with connected_later() as client, moving(client, memory(present=False)) as move:
        with pytest.raises(WeightsError, match="did not announce piece 1 within"):
            await move.receiving


@asynccontextmanager
async def connected_later() -> AsyncIterator[FlowClient]:
    yield FlowClient("/tmp/there-is-no-daemon")


async def test_without_a_daemon_a_load_goes_at_once_and_says_so():
    receiver = memory(present=False)
    async with connected_later() as client, moving(client, receiver) as move:
        await move.receiving
        assert (move.turn.flow, move.turn.held_s) == ("unavailable", 0.0)


async def test_without_flow_scheduling_nothing_is_said_of_it():
    async with moving(None, memory(present=False)) as move:
        await move.receiving
        assert move.turn == LoadTurn()


async def test_a_copy_in_host_memory_is_not_held_for_the_link(path):
    receiver = memory()
    receiver.keep_host_copy()
    receiver.release()
    async with serving(path) as daemon, connected(path) as client, connected(path) as other, sending(other):
        turns = load_turns(client, receiver.nbytes, "engine", over=MEMORY)
        assert turns is not None
        await asyncio.to_thread(receiver.load_host, None, turns)
        assert {flow["stage"] for flow in daemon.status()["flows"]} == {3, 4}
        turns.end()
        assert (turns.turn.flow, turns.turn.held_s < 0.5) == ("scheduled", True)


async def test_another_rank_asks_before_it_reads_its_copy(path, monkeypatch):
    """It has no event loop, so it asks from a thread of its own."""
    follower = warm_follower(monkeypatch)
    follower.load("disk")
    follower.release(True)
    monkeypatch.setenv("FLOW_SOCKET", path)
    async with serving(path) as daemon:
        assert await asyncio.to_thread(follower.load, "host") == follower.nbytes
        await until_on_loop(lambda: not daemon.status()["flows"])
        (flow,) = daemon.report("h")["flows"]
        assert (flow["stage"], flow["port"], flow["size_bytes"]) == (4, "memory", follower.nbytes)
        assert (flow["to"], flow["end"]) == (f"rank 1 of {folder().name}", "ended")


async def test_another_rank_is_held_and_let_go_by_a_daemon_that_ends(path, monkeypatch):
    follower = warm_follower(monkeypatch)
    follower.load("disk")
    follower.release(True)
    monkeypatch.setenv("FLOW_SOCKET", path)
    async with serving(path, "earliest_deadline") as daemon, connected(path) as other:
        first = other.submit(3, 10**9, "host", 100.0, over=MEMORY)
        await first.answered()
        loading = asyncio.create_task(asyncio.to_thread(follower.load, "host"))
        await until_on_loop(lambda: held(daemon))
        assert not loading.done()
        await daemon.close()
        assert await loading == follower.nbytes


async def test_another_rank_loads_without_a_daemon(path, monkeypatch):
    follower = warm_follower(monkeypatch)
    follower.load("disk")
    follower.release(True)
    monkeypatch.setenv("FLOW_SOCKET", path)
    assert await asyncio.to_thread(follower.load, "host") == follower.nbytes


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_the_record_of_an_engine_says_how_its_load_went(path, monkeypatch):
    monkeypatch.setenv("FLOW_SOCKET", path)
    same = (
        *("--executor", "torch", "--threads", "1", "--kv-cache-gib", "0.01", "--profile", "constant:5ms"),
        *("--model", str(folder()), "--shutdown-timeout", "0", "--served-model-name", "tiny"),
    )

    def start(*more: str) -> EngineProcess:
        return EngineProcess(*same, *more, token=FLEET["token"])

    async with serving(path), connected(path) as other:
        with await asyncio.to_thread(start) as source, await asyncio.to_thread(start, "--weights", "absent") as warm:
            async with aiohttp.ClientSession(warm.url) as session, sending(other):
                order = {"token": FLEET["token"], "sources": [{"kind": "engine", "url": source.url}]}
                status, said = await post(session, "/weights/load", order)
                assert (status, said["state"]) == (200, "present"), said
                (attempt,) = said["attempts"]
                assert (attempt["flow"], attempt["level"]) == ("scheduled", 8)
                assert 1.0 < attempt["held_s"] < attempt["seconds"]
                assert said["held_s"] == attempt["held_s"]
                await post(session, "/sleep?level=1", {"token": FLEET["token"]})
                await post(session, "/wake_up", {"token": FLEET["token"]})
                async with session.get("/weights") as response:
                    (attempt,) = (await response.json())["attempts"]
                assert (attempt["kind"], attempt["flow"], attempt["level"]) == ("host", "scheduled", 8)
                assert attempt["held_s"] < 0.5
