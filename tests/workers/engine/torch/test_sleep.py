"""A sleeping or warm engine leaves its memory to others: that of the KV cache goes and comes with the weights'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
import pytest
import torch

from controller.core.steps import Reserve, Seq
from tests.waiting import until_on_loop
from tests.workers.engine.offers import fleet_offer
from tests.workers.engine.process import FLEET
from tests.workers.engine.torch import test_kv_room as parts
from tests.workers.engine.torch.bench import folder, program
from tests.workers.engine.torch.test_kv_room import OUT_OF_MEMORY, raising, weights_held
from workers.engine.config import ServerConfig, parse
from workers.engine.kv.links import Links
from workers.engine.kv.transfer import KvTraffic, Offer
from workers.engine.server import build, with_model
from workers.engine.torch.kv.layout import TorchKv
from workers.http.fleet_proof import CHALLENGE_PATH, call_headers

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fleet_token")]
OPTIONS = ("--executor", "torch", "--threads", "1", "--kv-blocks", "64", "--block-size", "4", "--profile")
looks_often = parts.looks_often


class Whole:
    """An engine in the test's own loop, as the server wires it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.app, self.engine, self.stages = build(config, asyncio.get_running_loop())

    def close(self) -> None:
        self.engine.close()
        self.stages.close()

    async def post(self, path: str, query: str = "", token: str = "", **body: Any) -> tuple[int, dict[str, Any]]:
        raw, headers = orjson.dumps(body), dict[str, str]()
        if token:
            _, said = await self.call("GET", CHALLENGE_PATH)
            target = f"{path}?{query}" if query else path
            headers = call_headers(token, said["challenge"], "http://127.0.0.1:80", "POST", target, raw)
        return await self.call("POST", path, query, raw, headers)

    async def call(
        self, method: str, path: str, query: str = "", raw: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        messages, answers = asyncio.Queue[dict[str, Any]](), []
        messages.put_nowait({"type": "http.request", "body": raw})

        async def send(message: dict[str, Any]) -> None:
            answers.append(message)

        told = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": "http", "method": method, "path": path, "headers": told, "query_string": query.encode()}
        scope["server"] = ("127.0.0.1", 80)
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


@pytest.fixture
async def awake() -> AsyncIterator[Whole]:
    engine = Whole(configured())
    yield engine
    engine.close()


@pytest.fixture
async def warm() -> AsyncIterator[Whole]:
    engine = Whole(configured("--weights", "absent"))
    yield engine
    engine.close()


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


@pytest.fixture
async def elsewhere() -> AsyncIterator[Elsewhere]:
    other = Elsewhere()
    yield other
    other.links.close()


class Elsewhere:
    """A decode engine of the same model as far as it pulls."""

    def __init__(self) -> None:
        made = program(folder())
        self.kv = TorchKv(made.cache, made.model)
        self.links = Links(self.kv, FLEET["token"], KvTraffic(), 30.0)
        self.seq = Seq("t", 0.0, 40, 8, token_ids=[*range(40), 0], output_tokens=1, blocks=[*reversed(range(12))])

    async def pull(self, offer: Offer) -> tuple[int, list[bytes]]:
        """The first token, and what has come for each layer."""
        _, token = await self.links.pull(offer, self.seq)
        return token, entries(self.kv, self.seq)


def entries(kv: TorchKv, seq: Seq) -> list[bytes]:
    return [kv.read(seq, layer, 0, 40) for layer in range(kv.layers)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("weights", ["present", "absent"])
async def test_kv_that_another_engine_is_to_take_is_kept_so_long(elsewhere, looks_often, weights, level):
    engine = Whole(configured("--weights", weights))
    if weights == "absent":  # then they come after its start
        await engine.post("/weights/load", **FLEET, sources=[{"kind": "disk"}])
    offer = await offered(engine)
    cache, (seq, _) = engine.config.program.cache, engine.stages._kept[offer.request]
    before, wanted = cache.memory.clone(), entries(TorchKv(cache), seq)
    await engine.post("/sleep", f"level={level}", **FLEET)
    assert (engine.held, engine.stages.kept) == ((True, False), 1)
    assert torch.equal(cache.memory, before)
    assert await elsewhere.pull(offer) == (offer.first_token, wanted)
    await until_on_loop(lambda: engine.held == (False, False))
    engine.close()


async def test_kv_that_no_one_takes_is_kept_until_it_is_given_up(awake, looks_often):
    await offered(awake)
    await awake.post("/sleep", "level=2", **FLEET)
    assert awake.held == (True, False)
    assert awake.stages.free(["cmpl-r"]) == 1
    await until_on_loop(lambda: awake.held == (False, False))


async def offered(engine: Whole) -> Offer:
    """A prefill for somebody else."""
    asked = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 1, "request_id": "r", "ignore_eos": True}
    status, said = await engine.post("/v1/completions", **asked, kv_transfer_params={"do_remote_decode": True})
    assert (status, engine.stages.kept) == (200, 1)
    await engine.stages.start(0)
    told = said["kv_transfer_params"]
    at = ("127.0.0.1", engine.stages.server.port)
    return fleet_offer(*at, told["remote_request_id"], 40, told["first_token"], token=FLEET["token"])


async def test_a_decode_engine_takes_in_its_sleep_what_it_has_reserved_blocks_for(awake, looks_often):
    """In a sleep that keeps what waits: its blocks are written by the engine that sends, whenever it sends."""
    source = Whole(configured())
    offer = await offered(source)
    wanted = entries(TorchKv(source.config.program.cache), source.stages._kept[offer.request][0])
    seq = Seq("t", 0.0, 40, 4, token_ids=[*range(40), 0])
    awake.engine.handle(Reserve(seq))
    await awake.post("/sleep", "level=2&mode=keep", **FLEET)
    assert awake.held == (True, False)
    _, token = await awake.stages.links.pull(offer, seq)
    assert (token, entries(TorchKv(awake.config.program.cache), seq)) == (offer.first_token, wanted)
    await awake.post("/wake_up", **FLEET)
    assert awake.held == (True, True)
    source.close()
