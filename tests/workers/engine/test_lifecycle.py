"""Start and end of an engine process."""

import asyncio
import subprocess
import sys
import time

import aiohttp
import psutil
import pytest

from tests.workers.engine.client import COMPLETIONS, complete, events_of
from tests.workers.engine.process import EngineProcess


async def _stream(http: aiohttp.ClientSession, max_tokens: int, started: asyncio.Event) -> list[bytes]:
    body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    received = b""
    async with http.post(COMPLETIONS, json=body) as response:
        async for data in response.content.iter_any():
            received += data
            started.set()
    return events_of(received)


@pytest.mark.parametrize(("tokens", "grace", "reason"), [(60, "5", b'"length"'), (5000, "0.3", b'"abort"')])
async def test_sigterm_gives_running_requests_their_grace_then_ends_them(tokens, grace, reason):
    engine = EngineProcess("--profile", "constant:10ms", "--shutdown-timeout", grace)
    started = asyncio.Event()
    async with aiohttp.ClientSession(engine.url) as http:
        task = asyncio.create_task(_stream(http, tokens, started))
        await started.wait()
        begin = time.monotonic()
        status = await asyncio.to_thread(engine.stop)
        events = await task
    assert status == 0
    assert time.monotonic() - begin < 6.0
    assert events[-1] == b"[DONE]"
    assert reason in events[-2]


async def test_an_idle_engine_ends_at_once():
    engine = EngineProcess("--profile", "constant:10ms")
    begin = time.monotonic()
    assert engine.stop() == 0
    assert time.monotonic() - begin < 4.0


async def test_the_port_stays_closed_while_the_model_loads():
    begin = time.monotonic()
    with EngineProcess("--profile", "constant:1ms", "--startup-delay", "0.5") as engine:
        assert time.monotonic() - begin >= 0.5
        async with aiohttp.ClientSession(engine.url) as http:
            assert await complete(http, max_tokens=1)


def test_a_wrong_option_ends_with_its_name():
    command = [sys.executable, "-m", "workers.engine", "--port", "0", "--profile", "gpt-9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--profile: unknown profile 'gpt-9'; valid: " in done.stderr


async def test_preemption_under_a_tiny_cache_changes_no_text():
    options = ("--profile", "constant:1ms", "--max-model-len", "128", "--shutdown-timeout", "0")
    texts = []
    for blocks in ("512", "9"):
        with EngineProcess(*options, "--kv-blocks", blocks) as engine:
            async with aiohttp.ClientSession(engine.url) as http:
                asked = (complete(http, prompt=f"prompt {n}", max_tokens=60, ignore_eos=True) for n in range(6))
                texts.append([answer["choices"][0]["text"] for answer in await asyncio.gather(*asked)])
                async with http.get("/metrics") as response:
                    preempted = (
                        'num_preemptions_total{engine="0",model_name="constant"} 0.0' not in await response.text()
                    )
                assert preempted == (blocks == "9")
    assert texts[0] == texts[1]


async def test_memory_with_hundreds_of_open_streams():
    """An engine stays far below 150 MB with 400 streams of a kilobyte of prompt each open."""
    with EngineProcess("--profile", "constant:50ms", "--shutdown-timeout", "0") as engine:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(engine.url, connector=connector) as http:
            body = {"prompt": "x" * 1000, "max_tokens": 5000, "ignore_eos": True, "stream": True}
            responses = await asyncio.gather(*(http.post(COMPLETIONS, json=body) for _ in range(400)))
            assert all(response.status == 200 for response in responses)
            memory = psutil.Process(engine.process.pid).memory_full_info()
            for response in responses:
                response.close()
    assert memory.pss < 100 * 2**20
