"""Prefixes that one engine copies from another: real processes, and a wire that fails."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.waiting import until_on_loop
from tests.workers.engine.client import complete, post, samples
from tests.workers.engine.process import FLEET, EngineProcess, fleet
from tests.workers.engine.proxy import ELSEWHERE, Wire
from workers.engine.kv.digests import FRESH_S
from workers.engine.kv.transfer import KvConnection
from workers.engine.kv.wire import KvTransferError

PROMPT = list(range(10, 330))
LAYERS, TOKEN_BYTES = 3, 1024
OPTIONS = (
    *("--model", "tiny", "--max-model-len", "512", "--kv-blocks", "64"),
    *("--kv-layers", str(LAYERS), "--kv-token-bytes", str(TOKEN_BYTES), "--shutdown-timeout", "0"),
)


def slow_prefill(folder: Path, token_s: float) -> tuple[str, str]:
    """The option of a profile by which a prompt takes longer to compute than to copy. A decode step takes 2 ms."""
    path = folder / "slow-prefill.json"
    curves = {"prefill": {"a": 0.002, "b": token_s, "c": 0.0}, "decode": {"a": 0.002, "b": 0.0, "c": 0.0}}
    path.write_text(json.dumps(curves))
    return "--profile", str(path)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EngineProcess]]:
    options = (*OPTIONS, *slow_prefill(tmp_path_factory.mktemp("profile"), 0.0003))
    far = (*options, "--advertise-host", ELSEWHERE)
    with fleet(source=options, far=far, borrower=(*options, "--borrow-tokens", "64")) as found:
        yield found


@pytest.fixture
async def linked(sessions: dict[str, aiohttp.ClientSession]) -> dict[str, aiohttp.ClientSession]:
    """Both with empty caches, and a link over which the borrower reads from the source."""
    for http in sessions.values():
        await post(http, "/reset_prefix_cache", {**FLEET})
    await link_to(sessions["borrower"], [(await links_of(sessions["source"]))["at"]])
    return sessions


async def links_of(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/links") as answer:
        return await answer.json()


async def link_to(http: aiohttp.ClientSession, at: Sequence[dict[str, Any]]) -> None:
    token = secrets.token_hex(4)  # new links, which know nothing of what tests before have cached
    peers = [{"id": f"source-{index}-{token}", **each} for index, each in enumerate(at)]
    status, said = await post(http, "/links", {"id": "borrower", "peers": peers, "wait_s": 5.0, **FLEET})
    assert status == 200, said

    async def up() -> bool:
        return all(each["state"] == "up" for each in (await links_of(http))["peers"])

    await until_on_loop(up, within_s=10.0)


async def borrowed(http: aiohttp.ClientSession) -> tuple[int, int]:
    """Tokens of prefixes that came from other engines, and copies that were lost."""
    async with http.get("/metrics") as answer:
        text = await answer.text()
    found = {
        name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    }
    return int(found["slackline_kv_borrowed_tokens"]), int(found["slackline_kv_borrows_lost"])


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_prefix_that_another_engine_holds_is_copied_and_not_computed(linked):
    before, sent = await borrowed(linked["borrower"]), {"max_tokens": 6, "ignore_eos": True}
    whole = await complete(linked["source"], prompt=[*PROMPT, 1, 2, 3], **sent)
    answer = await complete(linked["borrower"], prompt=[*PROMPT, 1, 2, 3], **sent)
    assert cached(answer) == len(PROMPT)
    assert answer["choices"][0]["text"] == whole["choices"][0]["text"]
    assert await borrowed(linked["borrower"]) == (before[0] + len(PROMPT), before[1])
    again = await complete(linked["borrower"], prompt=[*PROMPT, 4], **sent)
    assert cached(again) == len(PROMPT)  # from its own cache
    assert await borrowed(linked["borrower"]) == (before[0] + len(PROMPT), before[1])
    assert (await samples(linked["borrower"]))["vllm:kv_cache_usage_perc", ""] == 0.0
    assert (await samples(linked["source"]))["vllm:kv_cache_usage_perc", ""] == 0.0


async def test_only_what_is_not_here_is_copied(linked):
    before, _ = await borrowed(linked["borrower"])
    await complete(linked["source"], prompt=[*PROMPT, 1], max_tokens=1)
    await complete(linked["borrower"], prompt=PROMPT[:60], max_tokens=1)  # 48 tokens in full blocks; fewer than 64
    answer = await complete(linked["borrower"], prompt=[*PROMPT, 1], max_tokens=1)
    assert cached(answer) == len(PROMPT)
    assert (await borrowed(linked["borrower"]))[0] - before == len(PROMPT) - 48


async def test_a_prefix_of_another_tenant_is_not_copied(linked):
    before = await borrowed(linked["borrower"])
    await complete(linked["source"], prompt=[*PROMPT, 1], max_tokens=1, cache_salt="one")
    answer = await complete(linked["borrower"], prompt=[*PROMPT, 1], max_tokens=1, cache_salt="two")
    assert cached(answer) == 0
    assert await borrowed(linked["borrower"]) == before
    await asyncio.sleep(FRESH_S)  # what the source has cached is believed for so long
    answer = await complete(linked["borrower"], prompt=[*PROMPT, 2], max_tokens=1, cache_salt="one")
    assert cached(answer) == len(PROMPT)


async def test_a_short_prefix_is_computed(linked):
    before = await borrowed(linked["borrower"])
    await complete(linked["source"], prompt=PROMPT[:60], max_tokens=1)
    assert cached(await complete(linked["borrower"], prompt=PROMPT[:60], max_tokens=1)) == 0
    assert await borrowed(linked["borrower"]) == before


@pytest.mark.parametrize("how", ["cut", "flip"])
async def test_what_is_lost_on_the_way_is_computed(linked, how):
    far = (await links_of(linked["far"]))["at"]
    await complete(linked["far"], prompt=[*PROMPT, 1], max_tokens=1)
    before = await borrowed(linked["borrower"])
    async with Wire(far["port"]) as wire:
        await link_to(linked["borrower"], [far])
        getattr(wire, how)(100_000)
        answer = await complete(linked["borrower"], prompt=[*PROMPT, 1], max_tokens=3, ignore_eos=True)
        assert wire.cuts + wire.flips == 1
    assert cached(answer) == 0
    assert answer["usage"]["completion_tokens"] == 3
    assert await borrowed(linked["borrower"]) == (before[0], before[1] + 1)
    assert (await samples(linked["borrower"]))["vllm:kv_cache_usage_perc", ""] == 0.0


async def test_an_engine_that_hangs_is_not_waited_for(linked, engines):
    await complete(linked["source"], prompt=[*PROMPT, 1], max_tokens=1)
    before = await borrowed(linked["borrower"])
    engines["source"].process.send_signal(signal.SIGSTOP)
    try:
        answer = await asyncio.wait_for(complete(linked["borrower"], prompt=[*PROMPT, 1], max_tokens=1), 10.0)
    finally:
        engines["source"].process.send_signal(signal.SIGCONT)
    assert cached(answer) == 0
    assert await borrowed(linked["borrower"]) == before


async def test_without_room_for_it_the_prompt_is_computed(linked):
    """The borrower's blocks are full of a running answer."""
    await complete(linked["source"], prompt=[*PROMPT, 1], max_tokens=1)
    before = await borrowed(linked["borrower"])
    others = [
        asyncio.ensure_future(
            complete(linked["borrower"], prompt=[n] * 400, max_tokens=110, min_tokens=110, ignore_eos=True)
        )
        for n in (7, 8)
    ]

    async def full() -> bool:
        return (await samples(linked["borrower"]))["vllm:kv_cache_usage_perc", ""] > 0.75

    await until_on_loop(full, within_s=10.0)
    answer = await complete(linked["borrower"], prompt=[*PROMPT, 1], max_tokens=1)
    await asyncio.gather(*others)
    assert cached(answer) == 0
    assert await borrowed(linked["borrower"]) == before


@pytest.mark.parametrize(
    ("asked", "data", "message"),
    [
        ({"op": "holds", "tokens": 0, "salt": ""}, b"", "tokens must be between"),
        ({"op": "holds", "tokens": 1 << 21, "salt": ""}, b"", "tokens must be between"),
        ({"op": "holds", "tokens": "8", "salt": ""}, b"", "tokens must be between"),
        ({"op": "holds", "tokens": 1, "salt": "no"}, bytes(8), "salt must be"),
        ({"op": "holds", "tokens": 1}, bytes(8), "salt must be"),
        ({"op": "lend", "tokens": 1, "salt": "", "start": 0}, bytes(8), "0 tokens are cached here"),
        ({"op": "lend", "tokens": 1, "salt": "", "start": -1}, bytes(8), "0 tokens are cached here"),
        ({"op": "lend", "tokens": 1, "salt": "", "start": 0, "stop": 1}, bytes(8), "0 tokens are cached here"),
        ({"op": "lend", "tokens": 1, "salt": "", "start": 0, "stop": "1"}, bytes(8), "0 tokens are cached here"),
    ],
)
async def test_a_wrong_question_is_refused_and_nothing_is_lent(linked, asked, data, message):
    at = (await links_of(linked["source"]))["at"]
    connection = await KvConnection.open(at["host"], at["port"], FLEET["token"], 5.0)
    try:
        with pytest.raises(KvTransferError, match=message):
            await connection._ask(asked, 5.0, data)
    finally:
        connection.close()
    assert (await samples(linked["source"]))["vllm:kv_cache_usage_perc", ""] == 0.0


async def test_a_client_that_goes_away_leaves_nothing_behind(linked):
    await complete(linked["source"], prompt=[*PROMPT, 1], max_tokens=1)
    for _ in range(5):
        sent = asyncio.ensure_future(complete(linked["borrower"], prompt=[*PROMPT, 1], max_tokens=100))
        await asyncio.sleep(0.005)
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)

    async def idle() -> bool:
        return (await samples(linked["borrower"]))["vllm:kv_cache_usage_perc", ""] == 0.0

    await until_on_loop(idle, within_s=10.0)
    assert cached(await complete(linked["borrower"], prompt=[*PROMPT, 1], max_tokens=1)) == len(PROMPT)


async def test_one_copy_serves_prompts_that_come_together(linked):
    """Sixteen with one system prompt: one copies it, the others wait for that."""
    before = await borrowed(linked["borrower"])
    await complete(linked["source"], prompt=[*PROMPT, 1], max_tokens=1)
    prompts = [[*PROMPT, 100 + number] for number in range(16)]
    answers = await asyncio.gather(*(complete(linked["borrower"], prompt=each, max_tokens=1) for each in prompts))
    assert [cached(answer) for answer in answers] == [len(PROMPT)] * 16
    assert await borrowed(linked["borrower"]) == (before[0] + len(PROMPT), before[1])


async def test_a_lender_that_has_more_lends_what_was_asked(linked):
    """The borrower rounds down to a token before its prompt's end; the lender has all of it."""
    before = await borrowed(linked["borrower"])
    await complete(linked["source"], prompt=[*PROMPT, *range(500, 560)], max_tokens=1)
    answer = await complete(linked["borrower"], prompt=PROMPT, max_tokens=1)
    assert cached(answer) == len(PROMPT) - 16
    assert await borrowed(linked["borrower"]) == (before[0] + len(PROMPT) - 16, before[1])
