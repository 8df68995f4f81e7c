"""Prefill on one real vLLM, decode on another: KV moves by TCP through Slackline's connector, as its daemon permits."""

from __future__ import annotations

import asyncio
import itertools
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psycopg
import pytest
import requests

from benchmarks.servers.engines import (
    CONTEXT_TOKENS,
    MAX_NUM_SEQS,
    MODEL_NAME,
    PLUGIN_ENVIRONMENT,
    RunningEngine,
    connector_arguments,
    vllm_missing,
    vllm_servers,
)
from benchmarks.servers.stack import Stack, StackFleet
from controller.core.kv_links import KvMoved
from tests.vllm.conftest import CLASSES, Client
from tests.vllm.test_serving import COMPLETIONS, ids
from tests.waiting import until, until_on_loop
from tests.workers.flowd.running import MB, connected, sending, serving
from workers.backends.http import kv_moved
from workers.backends.vllm import REMOTE_DECODE
from workers.supervisor.ports import free_port

pytestmark = pytest.mark.vllm

FIGURE = re.compile(r"(?m)^slackline:kv_(\w+)_total\{[^}]*\} ([0-9.e+]+)")
TOKEN_BYTES = 8 * 2 * 4 * 64 * 4  # layers, keys and values, heads, numbers of a head, bytes
WAIT_S = 60.0


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    """Of a transfer daemon that is there for some tests."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield f"{made}/flowd.sock"


@pytest.fixture(scope="module")
def pair(folder: Path, socket: str) -> Iterator[list[RunningEngine]]:
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    environment = {**PLUGIN_ENVIRONMENT, "FLEET_TOKEN": "of-one-fleet-only", "FLOW_SOCKET": socket}
    each = connector_arguments([free_port(), free_port()])
    # In bfloat16 vLLM's own tokens depend on how many are computed at once: near ties of this model go either way.
    arguments = ["--dtype", "float32", "--middleware", "workers.vllm_plugin.announce.Announce"]
    with vllm_servers(2, folder / "kv-logs", arguments=arguments, environment=environment, each=each) as started:
        yield started


def posted(engine: RunningEngine, prompt: list[int], tokens: int = 9, **more: Any) -> requests.Response:
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        "return_token_ids": True, **more,
    }  # fmt: skip
    answer = requests.post(f"{engine.url}{COMPLETIONS}", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer


def ask(engine: RunningEngine, prompt: list[int], tokens: int = 9, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = posted(engine, prompt, tokens, **more).json()
    return found


def how_it_came(answer: requests.Response) -> KvMoved:
    """As the server says with its answer."""
    moved = kv_moved(answer.headers.get("x-slackline-kv"))
    assert moved is not None
    return moved


def offer_of(engine: RunningEngine, prompt: list[int]) -> dict[str, Any]:
    params = ask(engine, prompt, 1, kv_transfer_params=REMOTE_DECODE)["kv_transfer_params"]
    assert isinstance(params, dict)
    return params


def tokens_of(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def figures(engine: RunningEngine) -> dict[str, float]:
    text = requests.get(f"{engine.url}/metrics", timeout=10).text
    return {name: float(value) for name, value in FIGURE.findall(text)}


@pytest.mark.parametrize("length", [5, 16, 700])
def test_tokens_are_those_of_a_server_that_does_all_alone(pair: list[RunningEngine], length: int) -> None:
    prefill, decode = pair
    prompt, before = ids(length), figures(decode)
    moved = tokens_of(ask(decode, prompt, kv_transfer_params=offer_of(prefill, prompt)))
    assert moved == tokens_of(ask(prefill, prompt))
    gained = figures(decode)["received_bytes"] - before["received_bytes"]
    block = gained / TOKEN_BYTES
    assert length <= block < length + 256, "whole blocks came over the connection"


def test_a_secret_gives_its_kv_once_and_another_prompt_none(pair: list[RunningEngine]) -> None:
    prefill, decode = pair
    prompt, other = ids(100), [5 + at % 900 for at in range(100)]
    offer, before = offer_of(prefill, prompt), figures(decode)
    for params in (offer, {**offer, "slackline_kv": "0" * 32}, {**offer, "remote_host": "192.0.2.1"}):
        asked = other if params is offer else prompt
        answer = posted(decode, asked, kv_transfer_params=params)
        assert tokens_of(answer.json()) == tokens_of(ask(prefill, asked))
        came = how_it_came(answer)
        assert came.reason == ("kv_lost" if params["slackline_kv"] == "0" * 32 else "refused")
        assert came.error
    after = figures(decode)
    assert after["received"] == before["received"]
    assert after["failed"] == before["failed"] + 1, "the one that named a secret that is not there"
    assert tokens_of(ask(decode, prompt, kv_transfer_params=offer)) == tokens_of(ask(prefill, prompt))
    assert figures(decode)["received"] == before["received"] + 1
    assert tokens_of(ask(decode, prompt, kv_transfer_params=offer)) == tokens_of(ask(prefill, prompt))
    assert figures(decode)["received"] == before["received"] + 1, "it was freed when it had arrived"


def fleet_of(urls: list[str]) -> StackFleet:
    return StackFleet(
        MODEL_NAME, urls, "vllm", MAX_NUM_SEQS, CLASSES, None, CONTEXT_TOKENS, roles=("prefill", "decode")
    )  # fmt: skip


def test_a_gateway_sends_requests_through_both(folder: Path, pair: list[RunningEngine]) -> None:
    before = figures(pair[1])
    with Stack(folder / "connector", fleet_of([each.url for each in pair])) as stack, stack.gateway() as gateway:
        client, prompt = Client(gateway.url, {"Authorization": f"Bearer {stack.api_key}"}), ids(300)
        answer = client.post(COMPLETIONS, prompt=prompt, max_tokens=9, ignore_eos=True, temperature=0)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-slackline-instance"] == "engine-1"
        assert answer.json()["choices"][0]["text"] == ask(pair[0], prompt)["choices"][0]["text"]
    assert figures(pair[1])["received"] == before["received"] + 1


def longest_pause_s(engine: RunningEngine, began: asyncio.Event, loop: asyncio.AbstractEventLoop, tokens: int) -> float:
    """Between two tokens of a stream."""
    body = {"model": MODEL_NAME, "prompt": ids(20), "max_tokens": tokens, "ignore_eos": True, "stream": True}
    times = []
    with requests.post(f"{engine.url}{COMPLETIONS}", json=body, stream=True, timeout=240) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                loop.call_soon_threadsafe(began.set)
    return max(later - earlier for earlier, later in itertools.pairwise(times))


HELD_S = 3.0
FOUND_S = 2.5  # until the server that prefills has found its daemon


async def test_a_load_that_is_held_stops_no_other_request(pair: list[RunningEngine], socket: str) -> None:
    """The daemon holds it while another transfer fills the link; it is promoted in time or sent when that has ended."""
    prefill, decode = pair
    prompt, before = ids(200), figures(prefill)
    alone = tokens_of(await asyncio.to_thread(ask, prefill, prompt))
    began, loop = asyncio.Event(), asyncio.get_running_loop()
    async with serving(socket, "earliest_deadline") as daemon, connected(socket) as other:
        await asyncio.sleep(FOUND_S)
        offer = await asyncio.to_thread(offer_of, prefill, prompt)
        async with sending(other):
            stream = asyncio.create_task(asyncio.to_thread(longest_pause_s, decode, began, loop, 200))
            await until_on_loop(lambda: began.is_set() or stream.done(), WAIT_S)
            assert began.is_set(), await stream
            load = asyncio.create_task(asyncio.to_thread(ask, decode, prompt, kv_transfer_params=offer))
            await until_on_loop(lambda: len(daemon.status()["flows"]) == 2, WAIT_S)
            await asyncio.sleep(HELD_S)
            assert not load.done(), "it is held"
        assert tokens_of(await load) == alone
        assert await stream < HELD_S / 2, "steps went on beside the load"
        assert await asyncio.to_thread(lambda: figures(prefill)["held_seconds"]) > before["held_seconds"] + HELD_S / 2


RECORDED = """SELECT ttft_met, ttft_s, step->'figures' || jsonb_build_object('reason', step->'reason')
    FROM request_record, jsonb_array_elements(decisions) AS step
    WHERE step->>'kind' = 'transfer' AND id = %s"""
TARGET_S = 25.0  # of which the transfer is held for some 11 s: it passes the other one when 12.8 s are left


def recorded(stack: Stack, request_id: str) -> list[tuple[bool, float, dict[str, Any]]]:
    """Of each transfer of a request: whether its first token was in time, after how long it came, and its figures with
    the reason."""
    with psycopg.connect(stack.environment["DATABASE_URL"]) as connection:
        return connection.execute(RECORDED, [request_id]).fetchall()


def asked(stack: Stack, url: str, **more: Any) -> tuple[bool, float, dict[str, Any]]:
    """Of a request that was answered, what its record says."""
    client = Client(url, {"Authorization": f"Bearer {stack.api_key}"})
    answer = client.post(COMPLETIONS, max_tokens=4, ignore_eos=True, **more)
    assert (answer.status_code, b"slackline" in answer.content) == (200, False), answer.text
    (one,) = until(partial(recorded, stack, answer.headers["x-slackline-request-id"]), WAIT_S, every_s=0.2)
    return one


async def test_the_record_says_that_a_transfer_was_held_and_promoted_in_time(
    folder: Path, pair: list[RunningEngine], socket: str
) -> None:
    """The link is full of another transfer of level 2, which has more time. The request's one begins below it."""
    with Stack(folder / "promoted", fleet_of([each.url for each in pair])) as stack, stack.gateway() as gateway:
        async with serving(socket, "mfs") as daemon, connected(socket) as other:
            await asyncio.sleep(FOUND_S)
            given = stack, gateway.url
            _, _, whole = await asyncio.to_thread(asked, *given, prompt=ids(100), target_ttft=60.0)
            async with sending(other, due_in_s=4000.0, size=20_000 * MB) as flow:
                await until_on_loop(lambda: daemon.status()["flows"][0]["rate"] > 100 * MB, WAIT_S)
                prompt = [5 + at % 900 for at in range(110)]
                in_time, ttft_s, held = await asyncio.to_thread(
                    asked, *given, prompt=prompt, target_ttft=TARGET_S, stream=True
                )
                assert flow.level == 2
    assert (whole["measured_by"], whole["flow"], whole["tokens"]) == ("engine", "scheduled", 100)
    assert whole["held_s"] < 1.0, "nothing else was on the link"
    assert (held["measured_by"], held["flow"], held["tokens"]) == ("engine", "scheduled", 110)
    assert held["promotions"] >= 1
    assert held["flow_level"] == 2
    assert 1.0 < held["held_s"] <= held["seconds"] <= ttft_s < TARGET_S
    assert in_time


@contextmanager
def with_offers_of(engine: RunningEngine, host: str) -> Iterator[str]:
    """The URL of a server that answers as this one does, but says that its KV waits at `host`."""

    class Relay(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(requests.get(f"{engine.url}{self.path}", timeout=WAIT_S))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {"Content-Type": "application/json"}
            self._answer(requests.post(f"{engine.url}{self.path}", data=body, headers=headers, timeout=WAIT_S))

        def _answer(self, found: requests.Response) -> None:
            content = re.sub(rb'("remote_host":\s*)"[^"]*"', rb'\1"%s"' % host.encode(), found.content)
            self.send_response(found.status_code)
            self.send_header("Content-Type", found.headers["Content-Type"])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *about: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Relay) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_record_says_that_an_offer_was_refused(folder: Path, pair: list[RunningEngine]) -> None:
    """The server that decodes does not know the address, so it asks for no KV and computes the prompt."""
    prefill, decode = pair
    prompt, before = ids(90), figures(decode)
    with (
        with_offers_of(prefill, "192.0.2.1") as url,
        Stack(folder / "refused", fleet_of([url, decode.url])) as stack,
        stack.gateway() as gateway,
    ):
        for streamed in (True, False):
            _, _, told = asked(stack, gateway.url, prompt=prompt, stream=streamed)
            assert (told["reason"], told["outcome"], told["bytes"]) == ("refused", "failed", 0)
            assert told["error"].startswith("the decode instance computed the prompt itself: 192.0.2.1:")
    after = figures(decode)
    assert [after[name] - before[name] for name in ("received", "failed")] == [0.0, 0.0], "no load began"


async def test_kv_whose_sender_dies_is_computed(pair: list[RunningEngine], socket: str) -> None:
    """The last test of this file: it kills the server that prefills."""
    prefill, decode = pair
    prompt, before = ids(250), figures(decode)
    alone = tokens_of(await asyncio.to_thread(ask, decode, prompt))
    async with serving(socket, "earliest_deadline") as daemon, connected(socket) as other, sending(other):
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 1, WAIT_S)
        await asyncio.sleep(FOUND_S)
        offer = await asyncio.to_thread(offer_of, prefill, prompt)
        load = asyncio.create_task(asyncio.to_thread(posted, decode, prompt, kv_transfer_params=offer))
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 2, WAIT_S)
        assert not load.done()
        await asyncio.to_thread(prefill.kill)
        answer = await load
        assert tokens_of(answer.json()) == alone
        assert how_it_came(answer).reason in ("cut", "unreachable")
    after = figures(decode)
    assert (after["failed"], after["received"]) == (before["failed"] + 1, before["received"])
