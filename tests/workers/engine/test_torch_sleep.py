"""A sleeping or warm engine leaves its memory to others: that of the KV cache goes and comes with the weights'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import torch

from controller.core.steps import Reserve, Seq
from tests.workers.engine import test_torch_kv_room as parts
from tests.workers.engine.process import FLEET
from tests.workers.engine.suspended import until
from tests.workers.engine.test_torch_kv_room import OUT_OF_MEMORY, raising, weights_held
from tests.workers.engine.torch_bench import folder
from workers.engine.config import ServerConfig, parse
from workers.engine.server import build, with_model

pytestmark = pytest.mark.torch
OPTIONS = ("--executor", "torch", "--threads", "1", "--kv-blocks", "64", "--block-size", "4", "--profile")
looks_often = parts.looks_often


class Whole:
    """An engine in the test's own loop, as the server wires it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.app, self.engine, self.handover = build(config, asyncio.get_running_loop())

    async def post(self, path: str, query: str = "", **body: Any) -> tuple[int, dict[str, Any]]:
        messages, answers = asyncio.Queue[dict[str, Any]](), []
        messages.put_nowait({"type": "http.request", "body": orjson.dumps(body)})

        async def send(message: dict[str, Any]) -> None:
            answers.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": query.encode()}
        await self.app(scope, messages.get, send)
        return answers[0]["status"], orjson.loads(b"".join(each.get("body", b"") for each in answers))

    async def says(self) -> tuple[str, int]:
        """The text, and how many tokens of the prompt were found in the prefix cache."""
        asked = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        cached = self.engine.scheduler.totals.prompt_cached
        status, said = await self.post("/v1/completions", **asked)
        assert status == 200, said
        return said["choices"][0]["text"], self.engine.scheduler.totals.prompt_cached - cached

    @property
    def held(self) -> tuple[bool, bool]:
        """Memory of the KV cache, of the weights."""
        return self.config.program.cache.held, weights_held(self.config.program) > 0


def configured(*options: str) -> ServerConfig:
    named = ("--port", "0", "--host", "127.0.0.1", "--model", str(folder()), "--served-model-name", "tiny")
    return with_model(parse([*named, *OPTIONS, "constant:1ms", *options]))


@pytest.fixture(autouse=True)
def _token(monkeypatch) -> None:
    monkeypatch.setenv("FLEET_TOKEN", FLEET["token"])


@pytest.fixture
async def awake() -> AsyncIterator[Whole]:
    engine = Whole(configured())
    yield engine
    engine.engine.close()


@pytest.fixture
async def warm() -> AsyncIterator[Whole]:
    engine = Whole(configured("--weights", "absent"))
    yield engine
    engine.engine.close()


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeper_holds_neither_kv_nor_weights_and_wakes_with_the_same_words(awake, level):
    said, _ = await awake.says()
    assert await awake.says() == (said, 36)
    status, _ = await awake.post("/sleep", f"level={level}", **FLEET)
    assert (status, awake.held) == (200, (False, False))
    status, _ = await awake.post("/wake_up", **FLEET)
    assert (status, awake.held) == (200, (True, True))
    assert await awake.says() == (said, 0)


async def test_a_sleeper_without_memory_for_its_cache_sleeps_on_and_says_why(awake, monkeypatch):
    said, _ = await awake.says()
    await awake.post("/sleep", "level=1", **FLEET)
    monkeypatch.setattr(torch, "zeros", raising(RuntimeError(OUT_OF_MEMORY)))
    status, answer = await awake.post("/wake_up", **FLEET)
    assert (status, awake.held, awake.engine.failed) == (503, (False, False), False)
    assert "no memory for the KV cache" in answer["error"]["message"]
    monkeypatch.undo()
    assert (await awake.post("/wake_up", **FLEET))[0] == 200  # from its own copy, which it still has
    assert await awake.says() == (said, 0)


async def test_a_paused_engine_keeps_all_it_has(awake):
    await awake.post("/sleep", "level=0", **FLEET)
    assert awake.held == (True, True)


async def test_a_warm_engine_holds_nothing_until_its_weights_come(warm, awake):
    assert warm.held == (False, False)
    status, said = await warm.post("/weights/load", **FLEET, sources=[{"kind": "host"}])
    assert (status, said["state"], warm.held) == (502, "absent", (False, False))
    status, said = await warm.post("/weights/load", **FLEET, sources=[{"kind": "disk"}])
    assert (status, said["state"], warm.held) == (200, "present", (True, True))
    assert await warm.says() == await awake.says()


async def test_a_warm_engine_without_memory_for_its_cache_says_so_and_is_warm(warm, monkeypatch):
    monkeypatch.setattr(torch, "zeros", raising(RuntimeError(OUT_OF_MEMORY)))
    status, said = await warm.post("/weights/load", **FLEET, sources=[{"kind": "disk"}])
    assert (status, said["state"], warm.held) == (502, "absent", (False, False))
    assert "no memory for the KV cache" in said["attempts"][0]["error"]


async def test_one_that_keeps_room_keeps_that_of_the_cache_too():
    engine = Whole(configured("--weights", "absent", "--keep-room"))
    assert engine.held == (True, True)
    await engine.post("/weights/load", **FLEET, sources=[{"kind": "disk"}])
    await engine.post("/sleep", "level=2", **FLEET)
    assert engine.held == (True, True)
    engine.engine.close()


async def test_a_warm_engine_that_measures_itself_gives_up_what_it_took_for_it():
    options = ("--port", "0", "--model", str(folder()), "--executor", "torch", "--threads", "1", "--kv-blocks", "512")
    config = with_model(parse([*options, "--scheduler", "preemptive", "--weights", "absent"]))
    assert config.profile.id == "measured"
    engine = Whole(config)
    assert engine.held == (False, False)
    engine.engine.close()


async def test_kv_that_another_engine_is_to_take_is_kept_so_long(awake, looks_often):
    params = {"do_remote_decode": True}
    asked = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 1, "request_id": "r", "ignore_eos": True}
    status, said = await awake.post("/v1/completions", **asked, kv_transfer_params=params)
    assert (status, awake.handover.kept) == (200, 1)
    before = awake.config.program.cache.memory.clone()
    await awake.post("/sleep", "level=2", **FLEET)
    assert (awake.held, awake.handover.kept) == ((True, False), 1)
    assert torch.equal(awake.config.program.cache.memory, before)
    assert awake.handover.free([said["id"]]) == 1
    await until(lambda: awake.held == (False, False))


async def test_kv_that_came_for_a_sequence_that_goes_on_is_kept_for_it(awake, looks_often):
    """In a sleep that keeps what waits: its blocks are written by the engine that sends, whenever it sends."""
    seq = Seq("r", 0.0, 8, 4, token_ids=list(range(9)))
    awake.engine.handle(Reserve(seq))
    await awake.post("/sleep", "level=2&mode=keep", **FLEET)
    assert awake.held == (True, False)
    await awake.post("/wake_up", **FLEET)
    assert awake.held == (True, True)
