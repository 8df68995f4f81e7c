"""Weights from engine to engine, from host memory and from disk: real processes, and every way it can go wrong."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.workers.engine.client import complete, post
from tests.workers.engine.process import FLEET
from tests.workers.engine.torch.bench import folder
from tests.workers.engine.torch.meetings import HOST, memory, met
from workers.engine.torch.weights.digest import digest
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.meeting import awaited
from workers.engine.torch.weights.pieces import PATIENCE_S
from workers.engine.torch.weights.store import TorchWeights
from workers.engine.torch.weights.transfer import WeightMemory
from workers.engine.weights.manager import LoadFailed, WeightManager
from workers.http.fleet_proof import CHALLENGE_PATH, PROOF

pytestmark = [pytest.mark.torch, pytest.mark.long(25)]
TOKEN = FLEET["token"]
COMMON = ("--executor", "torch", "--threads", "1", "--kv-cache-gib", "0.01", "--profile", "constant:5ms")
ASK: dict[str, Any] = {"prompt": list(range(40)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    same = (*COMMON, "--model", str(folder()), "--shutdown-timeout", "0", "--served-model-name", "tiny")
    other = (*COMMON, "--model", str(folder("Qwen2ForCausalLM")), "--shutdown-timeout", "0", "--kv-timeout", "3")
    without = ("--weights", "absent")
    return {"source": same, "warm": (*same, *without), "stranger": (*other, *without)}


async def load(session: aiohttp.ClientSession, *sources: dict[str, str], token: str = TOKEN) -> tuple[int, Any]:
    return await post(session, "/weights/load", {"token": token, "sources": list(sources)})


async def state(session: aiohttp.ClientSession) -> str:
    async with session.get("/weights") as response:
        return (await response.json())["state"]


async def absent(session: aiohttp.ClientSession) -> None:
    await post(session, "/sleep?level=2", {"token": TOKEN})
    assert await state(session) == "absent"


async def test_a_warm_engine_serves_what_its_source_serves(engines, sessions):
    assert await state(sessions["warm"]) == "absent"
    status, said = await load(sessions["warm"], {"kind": "engine", "url": engines["source"].url})
    assert (status, said["state"]) == (200, "present"), said
    (attempt,) = said["attempts"]
    assert (attempt["kind"], attempt["error"], attempt["bytes"]) == ("engine", "", said["bytes"])
    answers = [(await complete(sessions[name], **ASK))["choices"][0]["text"] for name in ("source", "warm")]
    assert answers[0] == answers[1]


async def test_each_source_that_fails_is_recorded_and_the_next_one_tried(engines, sessions):
    await absent(sessions["warm"])
    dead = {"kind": "engine", "url": "http://127.0.0.1:9"}
    status, said = await load(sessions["warm"], dead, {"kind": "host"}, {"kind": "disk"})
    assert (status, said.get("state")) == (200, "present"), said
    assert [(each["kind"], bool(each["error"])) for each in said["attempts"]] == [
        ("engine", True),
        ("host", True),
        ("disk", False),
    ]
    assert "no copy in host memory" in said["attempts"][1]["error"]


async def test_another_model_is_refused_and_nothing_is_served(engines, sessions):
    status, said = await load(sessions["stranger"], {"kind": "engine", "url": engines["source"].url})
    assert (status, said["loaded"], said["state"]) == (502, False, "absent")
    error = said["attempts"][0]["error"]
    assert "returned 409" in error
    assert all(name in error for name in ("holds tiny (checkpoint ", f"not {folder('Qwen2ForCausalLM').name} (check"))


async def test_a_source_without_weights_cannot_give_them(engines, sessions):
    await absent(sessions["warm"])
    status, said = await load(sessions["stranger"], {"kind": "engine", "url": engines["warm"].url})
    assert (status, "409" in said["attempts"][0]["error"]) == (502, True)
    await load(sessions["warm"], {"kind": "disk"})


async def test_only_the_fleet_may_load_or_take(sessions):
    status, said = await load(sessions["warm"], {"kind": "disk"}, token="guess")
    assert (status, said["error"]["param"]) == (403, PROOF)
    status, said = await post(sessions["source"], "/weights/send", {"token": "", "host": "127.0.0.1", "port": 5})
    assert status == 403
    order = {"token": TOKEN, "host": "127.0.0.1", "port": 5}
    for field in ("nonce", "model", "checkpoint"):
        status, said = await post(sessions["source"], "/weights/send", order)
        assert (status, said["error"]["param"]) == (400, field)
        order[field] = "x"


@pytest.mark.parametrize(
    ("sources", "field"),
    [([], "sources"), ([{"kind": "tape"}], "sources[0].kind"), ([{"kind": "engine"}], "sources[0].url")],
)
async def test_nonsense_is_refused_with_the_field(sessions, sources, field):
    status, said = await post(sessions["warm"], "/weights/load", {"token": TOKEN, "sources": sources})
    assert (status, said["error"]["param"]) == (400, field)


async def test_level_one_comes_back_from_host_memory_and_two_from_disk(sessions):
    before = (await complete(sessions["warm"], **ASK))["choices"][0]["text"]
    for level, kind in ((1, "host"), (2, "disk")):
        await post(sessions["warm"], f"/sleep?level={level}", {"token": TOKEN})
        assert await state(sessions["warm"]) == "absent"
        status, _ = await post(sessions["warm"], "/wake_up", {"token": TOKEN})
        assert status == 200
        async with sessions["warm"].get("/weights") as response:
            attempts = (await response.json())["attempts"]
        assert [each["kind"] for each in attempts] == [kind], attempts
        assert (await complete(sessions["warm"], **ASK))["choices"][0]["text"] == before


async def challenge(request: web.Request) -> web.Response:
    return web.json_response({"challenge": "c"})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("answer", [{}, {"tensors": [["a"]]}, {"tensors": 7}, [1], "text"])
async def test_a_source_that_answers_nonsense_is_recorded_and_the_next_one_tried(sessions, answer):
    async def send(request: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/weights/send", send)
    app.router.add_get(CHALLENGE_PATH, challenge)
    async with TestServer(app) as server:
        await absent(sessions["warm"])
        status, said = await load(
            sessions["warm"], {"kind": "engine", "url": str(server.make_url(""))}, {"kind": "disk"}
        )
    assert (status, said["state"]) == (200, "present"), said
    assert [(each["kind"], bool(each["error"])) for each in said["attempts"]] == [("engine", True), ("disk", False)]


# ---- memory, without engines ----------------------------------------------------------------------------------------


async def exchange(sender: WeightMemory, receiver: WeightMemory, theirs: Any = None) -> None:
    """What the receiver raises; the sender's end is not looked at."""
    async with met() as (source, meeting):
        sending = asyncio.create_task(asyncio.to_thread(sender.send, source))
        try:
            await asyncio.to_thread(receiver.receive, meeting, theirs or sender.manifest())
        finally:
            await asyncio.gather(sending, return_exceptions=True)


async def test_what_arrives_is_equal_bit_for_bit():
    sender, receiver = memory(), memory()
    receiver.release()
    assert not receiver.present
    await exchange(sender, receiver)
    assert receiver.present
    assert receiver.manifest() == sender.manifest()
    assert [a.digest for a in memory().manifest()] == [b.digest for b in receiver.manifest()]


def test_released_memory_holds_nothing_and_takes_nothing():
    held = memory()
    held.release()
    with pytest.raises(WeightsError, match="no weights"):
        held.manifest()
    with pytest.raises(WeightsError, match="no weights"):
        held.send(None)  # asked before anybody is met


async def test_a_damaged_tensor_is_noticed_by_name():
    sender, receiver = memory(), memory()
    theirs = sender.manifest()
    with torch.no_grad():
        next(iter(sender._memory.values())).add_(1.0)
    with pytest.raises(WeightsError, match="arrived damaged"):
        await exchange(sender, receiver, theirs=theirs)
    assert not receiver.present


def threads_of_transfers() -> int:
    """Threads of the process but for asyncio's own, which it makes as it needs them and keeps."""
    kept = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
    return psutil.Process().num_threads() - kept


async def test_nothing_that_was_on_its_way_is_written_over_the_next_source():
    sender, receiver = memory(), memory()
    await exchange(sender, receiver)
    threads = threads_of_transfers()
    good = receiver.manifest()
    theirs = sender.manifest()
    with torch.no_grad():
        for tensor in sender._memory.values():
            tensor.fill_(7.0)
    with pytest.raises(WeightsError, match="arrived damaged"):
        await exchange(sender, receiver, theirs=theirs)
    receiver.load_disk(folder())
    async with asyncio.timeout(10):
        while threads_of_transfers() > threads:  # one could still write
            await asyncio.sleep(0.01)
    assert [digest(tensor) for tensor in receiver._memory.values()] == [info.digest for info in good]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("killed", [True, False])
async def test_a_source_that_goes_silent_in_the_middle_is_given_up_soon_and_the_next_one_tried(sessions, killed):
    """By kill -9 or by standing still; not after `--kv-timeout`, which is 30 s here."""
    command = (sys.executable, "-m", "tests.workers.engine.torch.source", str(folder()), "3")
    pipe = asyncio.subprocess.PIPE
    source = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert source.stdin is not None
    assert source.stdout is not None
    manifest = [list(info) for info in memory().manifest()]

    async def send(request: web.Request) -> web.Response:
        order = await request.json()
        source.stdin.write(f"{order['host']} {order['port']} {order['nonce']}\n".encode())
        return web.json_response({"tensors": manifest})

    app = web.Application()
    app.router.add_post("/weights/send", send)
    app.router.add_get(CHALLENGE_PATH, challenge)
    try:
        assert await source.stdout.readline() == b"ready\n"
        async with TestServer(app) as server:
            await absent(sessions["warm"])
            sources = ({"kind": "engine", "url": str(server.make_url(""))}, {"kind": "disk"})
            loading = asyncio.create_task(load(sessions["warm"], *sources))
            assert await source.stdout.readline() == b"silent\n"
            silent_at = time.monotonic()
            if killed:
                source.kill()
            status, said = await loading
            seconds = time.monotonic() - silent_at
    finally:
        if source.returncode is None:
            source.kill()
        await source.wait()
    assert (status, said["state"]) == (200, "present"), said
    assert [(each["kind"], bool(each["error"])) for each in said["attempts"]] == [("engine", True), ("disk", False)]
    assert "the transfer failed" in said["attempts"][0]["error"]
    assert seconds < PATIENCE_S + 5.0


def store(memory: WeightMemory) -> TorchWeights:
    return TorchWeights(memory, folder(), "127.0.0.1", TOKEN, 2.0, model="tiny")


async def test_a_source_is_not_put_to_sleep_while_it_sends():
    """Its memory would be freed under the transfer."""
    weights = store(memory())
    async with awaited(HOST, TOKEN, 2.0) as waiting:
        await weights.send(HOST, waiting.port, waiting.nonce)  # nobody joins the group: until its time is up
        assert weights.sending
        with pytest.raises(LoadFailed, match="loaded or sent"):
            await WeightManager(weights).release(keep_host_copy=False)
        async with asyncio.timeout(30):
            while weights.sending:
                await asyncio.sleep(0.05)
    await WeightManager(weights).release(keep_host_copy=False)
    assert not weights.present


async def test_a_source_that_reaches_no_one_sends_nothing():
    weights = store(memory())
    with pytest.raises(LoadFailed, match="no engine of the fleet waits for weights at "):
        await weights.send(HOST, 9, "nonce")
    assert not weights.sending


async def test_without_room_for_a_copy_the_weights_stay(monkeypatch):
    weights = store(memory())

    def full(self: WeightMemory) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 1 byte")

    monkeypatch.setattr(WeightMemory, "keep_host_copy", full)
    with pytest.raises(LoadFailed, match="no copy could be kept in host memory"):
        await weights.release(keep_host_copy=True)
    assert (weights.present, weights.has_host_copy) == (True, False)
