"""Links between real engines: made when they are told, watched, cut in the middle of a transfer, and up again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson
import pytest

from controller.core.kv_links import moved_from_json
from tests.workers.engine.client import COMPLETIONS, complete, post, samples
from tests.workers.engine.process import FLEET
from tests.workers.engine.proxy import ELSEWHERE, Wire
from workers.http.fleet_proof import PROOF

TOKEN = FLEET["token"]
PROMPT = list(range(10, 110))
LAYERS, TOKEN_BYTES = 8, 4096
WHOLE = LAYERS * TOKEN_BYTES * len(PROMPT)  # bytes of the prompt's KV
OPTIONS = (
    *("--profile", "constant:2ms", "--model", "tiny", "--max-model-len", "512", "--kv-blocks", "64"),
    *("--kv-layers", str(LAYERS), "--kv-token-bytes", str(TOKEN_BYTES), "--shutdown-timeout", "0"),
    *("--no-enable-prefix-caching",),
)


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    prefill = (*OPTIONS, "--role", "prefill", "--advertise-host", ELSEWHERE)
    return {"p": prefill, "d": (*OPTIONS, "--role", "decode")}


async def links(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/links") as answer:
        return await answer.json()


async def release(session: aiohttp.ClientSession, *names: str) -> tuple[int, dict[str, Any]]:
    return await post(session, "/kv/release", {"token": TOKEN, "request_ids": names})


async def announce(sessions: dict[str, aiohttp.ClientSession], wait_s: float = 2.0) -> dict[str, Any]:
    """Tell d of p; what d then says of that link."""
    at = (await links(sessions["p"]))["at"]
    body = {"token": TOKEN, "id": "d", "peers": [{"id": "p", **at}], "wait_s": wait_s}
    status, said = await post(sessions["d"], "/links", body)
    assert status == 200, said
    (peer,) = said["peers"]
    return peer


async def state(sessions: dict[str, aiohttp.ClientSession], wanted: str, within_s: float = 8.0) -> dict[str, Any]:
    give_up_at = time.monotonic() + within_s
    while (peer := (await links(sessions["d"]))["peers"][0])["state"] != wanted:
        assert time.monotonic() < give_up_at, peer
        await asyncio.sleep(0.05)
    return peer


async def offer(sessions: dict[str, aiohttp.ClientSession], name: str = "r") -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 1, "request_id": name, "kv_transfer_params": {"do_remote_decode": True}}
    return (await complete(sessions["p"], **body))["kv_transfer_params"]


async def decode(sessions: dict[str, aiohttp.ClientSession], params: dict[str, Any]) -> tuple[int, Any, Any]:
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "kv_transfer_params": params}
    async with sessions["d"].post(COMPLETIONS, json={"model": "tiny", **body}) as answer:
        told = answer.headers.get("x-slackline-kv")
        return answer.status, await answer.json(), moved_from_json(orjson.loads(told)) if told else None


async def test_a_link_is_open_and_measured_before_the_first_request(sessions):
    status, _ = await post(sessions["d"], "/links", {"token": TOKEN, "id": "d", "peers": [], "wait_s": 0.0})
    assert (status, (await links(sessions["d"]))["peers"]) == (200, []), "what earlier tests did over it is forgotten"
    async with Wire((await links(sessions["p"]))["at"]["port"]):
        peer = await announce(sessions)
        assert (peer["peer"], peer["state"], peer["host"]) == ("p", "up", ELSEWHERE)
        assert peer["bandwidth_bytes_s"] > 1e6
        assert 0 < peer["latency_s"] < 1
        assert (peer["transfers"], peer["bytes"], peer["failures"]) == (0, 0, 0)


async def test_a_transfer_over_it_is_measured_and_told_with_the_answer(sessions):
    async with Wire((await links(sessions["p"]))["at"]["port"]):
        await announce(sessions)
        await state(sessions, "up", within_s=15)
        before = (await links(sessions["d"]))["peers"][0]
        status, answer, moved = await decode(sessions, await offer(sessions))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        assert (moved.bytes, moved.layers, moved.tokens, moved.cached) == (WHOLE, LAYERS, len(PROMPT), 0)
        assert (moved.reserved, moved.reason) == (True, "")
        assert 0 < moved.seconds < 5
        after = (await links(sessions["d"]))["peers"][0]
        assert (after["transfers"] - before["transfers"], after["bytes"] - before["bytes"]) == (1, WHOLE)


async def test_cut_half_way_it_says_how_far_it_came_and_can_be_pulled_again(sessions):
    async with Wire((await links(sessions["p"]))["at"]["port"]) as wire:
        await announce(sessions)
        params = await offer(sessions)
        wire.cut(after=WHOLE // 2)
        status, answer, _ = await decode(sessions, params)
        assert (status, wire.cuts) == (502, 1)
        moved = moved_from_json(answer["error"]["kv"])
        assert moved.reason == "cut"
        assert 0.3 * WHOLE < moved.bytes <= WHOLE / 2
        assert moved.layers in (LAYERS // 2 - 1, LAYERS // 2 - 2)
        peer = (await links(sessions["d"]))["peers"][0]
        assert (peer["state"], peer["failures"] >= 1) == ("degraded", True)
        assert "closed" in peer["last_error"]
        status, _, moved = await decode(sessions, params)
        assert (status, moved.bytes) == (200, WHOLE), "the source has it still"


async def test_a_severed_link_is_down_within_seconds_and_up_again_by_itself(sessions):
    async with Wire((await links(sessions["p"]))["at"]["port"]) as wire:
        await announce(sessions)
        await wire.sever()
        peer = await state(sessions, "down")
        assert peer["last_error"]
        params = await offer(sessions)
        began = time.monotonic()
        status, answer, _ = await decode(sessions, params)
        assert (status, answer["error"]["kv"]["reason"]) == (502, "unreachable")
        assert time.monotonic() - began < 3, "no waiting for a dead link"
        await wire.mend()
        await state(sessions, "degraded")
        status, _, moved = await decode(sessions, params)
        assert (status, moved.bytes) == (200, WHOLE)
        assert (await samples(sessions["d"]))["vllm:kv_cache_usage_perc", ""] == 0


async def test_kept_kv_is_released_by_the_clients_id(sessions):
    async with Wire((await links(sessions["p"]))["at"]["port"]):
        await announce(sessions)
        params = await offer(sessions, "wanted-no-more")
        kept = (await samples(sessions["p"]))["vllm:kv_cache_usage_perc", ""]
        status, said = await release(sessions["p"], "wanted-no-more", "unknown")
        assert (status, said) == (200, {"released": 1})
        assert (await samples(sessions["p"]))["vllm:kv_cache_usage_perc", ""] < kept
        assert (await release(sessions["p"], "wanted-no-more"))[1] == {"released": 0}
        status, answer, _ = await decode(sessions, params)
        assert (status, answer["error"]["kv"]["reason"]) == (502, "kv_lost")
        assert (await links(sessions["d"]))["peers"][0]["state"] in ("up", "degraded")


async def test_peers_that_are_announced_no_more_are_forgotten(sessions):
    async with Wire((await links(sessions["p"]))["at"]["port"]):
        await announce(sessions)
        status, said = await post(sessions["d"], "/links", {"token": TOKEN, "id": "d", "peers": []})
        assert (status, said["peers"]) == (200, [])


async def test_announcing_twice_leaves_links_as_they_are(sessions):
    async with Wire((await links(sessions["p"]))["at"]["port"]):
        first = await announce(sessions)
        await decode(sessions, await offer(sessions))
        assert (await announce(sessions))["transfers"] == first["transfers"] + 1


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"token": "wrong"}, 403, PROOF),
        ({"token": ""}, 403, PROOF),
        ({"peers": "p"}, 400, "peers"),
        ({"peers": [3]}, 400, "peers[0]"),
        ({"peers": [{"id": "p", "host": "h"}]}, 400, "peers[0]"),
        ({"peers": [{"id": "p", "host": "h", "port": 70000}]}, 400, "peers[0].port"),
        ({"wait_s": 60}, 400, "wait_s"),
    ],
)
async def test_a_wrong_announcement_is_refused_with_its_field(sessions, change, status, field):
    body = {"token": TOKEN, "id": "d", "peers": [], **change}
    answered, said = await post(sessions["d"], "/links", body)
    assert (answered, said["error"]["param"]) == (status, field), said


async def test_no_one_without_the_token_gets_through_the_greeting(sessions):
    """A stranger learns a nonce and a proof that it cannot make itself, and nothing after it."""
    at = (await links(sessions["d"]))["at"]
    reader, writer = await asyncio.open_connection(at["host"], at["port"])
    for frame in ({"nonce": "0" * 32, "to": f"{at['host']}:{at['port']}"}, {"proof": "0" * 64}):
        raw = orjson.dumps(frame)
        writer.write(len(raw).to_bytes(4, "big") + raw)
        length = int.from_bytes(await reader.readexactly(4), "big")
        said = orjson.loads(await reader.readexactly(length))
    assert said == {"error": "the fleet's token is wrong"}
    assert await reader.read() == b""
    writer.close()
