"""Prompts that are computed while their prefix is still copied from another engine: real processes, and a wire that
holds the copy in the middle of a layer.

The same with a real model: tests/workers/engine/torch/test_overlapped_prefixes.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.waiting import until_on_loop
from tests.workers.engine.client import complete, post, samples
from tests.workers.engine.kv.test_prefixes import borrowed, cached, link_to, links_of, slow_prefill
from tests.workers.engine.process import FLEET, EngineProcess, fleet
from tests.workers.engine.proxy import ELSEWHERE, Wire

PROMPT = [(7 * i + 3) % 500 for i in range(320)]
LAYERS = 4
OPTIONS = (
    *("--model", "tiny", "--max-model-len", "512", "--kv-blocks", "64"),
    *("--kv-layers", str(LAYERS), "--kv-token-bytes", "1024", "--shutdown-timeout", "0"),
)
SENT = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EngineProcess]]:
    options = (*OPTIONS, *slow_prefill(tmp_path_factory.mktemp("profile"), 0.004))
    borrower = (*options, "--borrow-tokens", "64")
    with fleet(
        source=(*options, "--advertise-host", ELSEWHERE), borrower=(*borrower, "--scheduler", "preemptive")
    ) as found:
        yield found


class Held:
    """A copy that is held after `layers` and a half of another one. `whole`: the lender's answer to `body`."""

    def __init__(self, sessions: dict[str, aiohttp.ClientSession], wire: Wire) -> None:
        self.http, self.source, self.wire = sessions["borrower"], sessions["source"], wire
        self.body: dict[str, Any] = {"prompt": [*PROMPT, 1, 2, 3], **SENT}
        self.whole: dict[str, Any] = {}

    async def begin(self, layers: int) -> None:
        self.whole = await complete(self.source, **self.body)
        received = await self._received()
        await complete(self.http, **self.body)
        layer = (await self._received() - received) / LAYERS
        assert layer > 0
        await post(self.http, "/reset_prefix_cache", {**FLEET})
        self.wire.hold(int((layers + 0.5) * layer))
        self.before = await borrowed(self.http)
        self.waits_before = await self.waits()

    async def _received(self) -> int:
        """Bytes of prefixes."""
        async with self.http.get("/metrics") as answer:
            lines = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line[0] != "#")
        return int(float(lines["slackline_kv_borrowed_bytes"]))

    def send(self, **more: Any) -> asyncio.Future[dict[str, Any]]:
        return asyncio.ensure_future(complete(self.http, **{**self.body, **more}))

    async def held(self) -> None:
        await until_on_loop(lambda: self.wire.held == 1)

    async def waits(self) -> int:
        async with self.http.get("/server_info") as answer:
            preemption = (await answer.json())["preemption"]
        return preemption["rounds"]["layer_waits"] if preemption else 0

    async def waiting(self) -> None:
        """A step has stopped for a layer."""

        async def stopped() -> bool:
            return await self.waits() > self.waits_before

        await until_on_loop(stopped)

    def go(self) -> None:
        self.wire.go()

    async def idle(self) -> None:
        async def free() -> bool:
            return (await samples(self.http))["vllm:kv_cache_usage_perc", ""] == 0.0

        await until_on_loop(free)


@asynccontextmanager
async def holding(sessions: dict[str, aiohttp.ClientSession]) -> AsyncIterator[Held]:
    at = (await links_of(sessions["source"]))["at"]
    async with Wire(at["port"]) as wire:
        await post(sessions["borrower"], "/reset_prefix_cache", {**FLEET})
        await link_to(sessions["borrower"], [at])
        yield Held(sessions, wire)
        await link_to(sessions["borrower"], [])  # so that the next link has no failure to remember


async def test_others_are_answered_while_it_waits_for_a_layer(sessions) -> None:
    async with holding(sessions) as copy:
        await copy.begin(2)
        coming = copy.send()
        await copy.held()
        await copy.waiting()
        other = await complete(copy.http, prompt=[9] * 40, **SENT)
        assert other["usage"]["completion_tokens"] == 6
        assert not coming.done()
        copy.go()
        answer = await coming
        assert cached(answer) == len(PROMPT)
        assert answer["choices"][0]["text"] == copy.whole["choices"][0]["text"]
        assert await borrowed(copy.http) == (copy.before[0] + len(PROMPT), copy.before[1])
        await copy.idle()


async def test_layers_that_are_lost_are_computed(sessions) -> None:
    async with holding(sessions) as copy:
        await copy.begin(2)
        coming = copy.send()
        await copy.held()
        await copy.waiting()
        await copy.wire.sever()
        answer = await coming
        assert answer["choices"][0]["text"] == copy.whole["choices"][0]["text"]
        assert cached(answer) == 0
        assert await borrowed(copy.http) == (copy.before[0], copy.before[1] + 1)
        await copy.idle()
        again = await complete(copy.http, **copy.body)
        assert again["choices"][0]["text"] == copy.whole["choices"][0]["text"]
        assert cached(again) == len(PROMPT)  # of its own


@pytest.mark.slow
async def test_a_client_that_goes_away_ends_the_copy(sessions) -> None:
    async with holding(sessions) as copy:
        await copy.begin(2)
        coming = copy.send()
        await copy.held()
        await copy.waiting()
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await copy.idle()
        copy.go()
        assert (await borrowed(copy.http))[0] == copy.before[0], "nothing was borrowed"


@pytest.mark.slow
async def test_a_prompt_does_not_wait_for_a_copy_beyond_its_waiting_time(sessions) -> None:
    """The device is free, so it begins then, and is computed."""
    async with holding(sessions) as copy:
        await copy.begin(0)
        answer = await asyncio.wait_for(copy.send(waiting_in=0.2), 10.0)
        assert answer["choices"][0]["text"] == copy.whole["choices"][0]["text"]
        assert cached(answer) == 0
        copy.go()
        await copy.idle()
