"""A prefix of a real model's KV that another engine computed: the answer is that engine's, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from tests.waiting import until_on_loop
from tests.workers.engine.client import complete, post
from tests.workers.engine.process import FLEET
from tests.workers.engine.torch.bench import VOCABULARY, folder

pytestmark = [pytest.mark.torch, pytest.mark.long(45)]
DEARER_TO_COMPUTE = ("--kv-heads", "1", "--intermediate", "2048")  # than to copy
PREFIX = [(7 * i + 3) % VOCABULARY for i in range(160)]


@pytest.fixture(scope="module", params=["continuous", "slackline"])
def engine_options(request: pytest.FixtureRequest) -> dict[str, Sequence[str]]:
    model = folder("LlamaForCausalLM", *DEARER_TO_COMPUTE, "--layers", "4")
    options = ("--executor", "torch", "--model", str(model), "--threads", "1", "--kv-cache-gib", "0.04")
    options = (*options, "--profile", "constant:5ms", "--shutdown-timeout", "0", "--scheduler", request.param)
    return {"source": options, "borrower": (*options, "--borrow-tokens", "64")}


async def links_of(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/links") as answer:
        return await answer.json()


async def lent(http: aiohttp.ClientSession) -> str:
    """The line of the metrics with the number of prefixes that were lent."""
    async with http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(line for line in lines if line.startswith("slackline_kv_lent "))


async def link(sessions: dict[str, aiohttp.ClientSession]) -> None:
    """The borrower's cache is empty, and it reads from the source."""
    at = (await links_of(sessions["source"]))["at"]
    peers = [{"id": "source", **at}]
    await post(sessions["borrower"], "/links", {"id": "borrower", "peers": peers, "wait_s": 5.0, **FLEET})
    await post(sessions["borrower"], "/reset_prefix_cache", {**FLEET})

    async def up() -> bool:
        return (await links_of(sessions["borrower"]))["peers"][0]["state"] == "up"

    await until_on_loop(up)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}])
async def test_an_answer_from_a_borrowed_prefix_is_the_lenders(sessions, sampling):
    await link(sessions)
    body = {"prompt": [*PREFIX, 5, 6, 7], "ignore_eos": True, "max_tokens": 20, **sampling}
    whole = await complete(sessions["source"], **body)
    answer = await complete(sessions["borrower"], **body)
    assert answer["choices"][0]["text"] == whole["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PREFIX)


async def test_a_prompt_that_arrives_asleep_is_answered_after_the_sleep(sessions):
    """There is no KV memory that a prefix could be copied to."""
    await link(sessions)
    body = {"prompt": [*PREFIX, 8, 9], "ignore_eos": True, "max_tokens": 5, "temperature": 0}
    whole = await complete(sessions["source"], **body)
    before = await lent(sessions["source"])
    assert (await post(sessions["borrower"], "/sleep?level=1&mode=keep", {**FLEET}))[0] == 200
    coming = asyncio.ensure_future(complete(sessions["borrower"], **body))
    await asyncio.wait((coming,), timeout=0.5)
    assert not coming.done()
    assert (await post(sessions["borrower"], "/wake_up", {**FLEET}))[0] == 200
    assert (await coming)["choices"][0]["text"] == whole["choices"][0]["text"]
    assert await lent(sessions["source"]) == before
