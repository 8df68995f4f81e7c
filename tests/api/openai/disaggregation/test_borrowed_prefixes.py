"""A prefix that one prefill engine has computed, reused by another one: real engines behind a gateway, and the transfer
daemon that lets more urgent transfers go first."""

from __future__ import annotations

import asyncio
import json
import tempfile
from typing import Any

import aiohttp

from controller.core.types import InstanceSpec, Role
from controller.flow.flows import FlowStage
from tests.api.openai.gateways import completion
from tests.api.openai.servers import ServerBed
from tests.waiting import until_on_loop
from tests.workers.engine.client import post
from tests.workers.engine.kv.test_prefixes import slow_prefill
from tests.workers.engine.process import EngineProcess
from tests.workers.flowd.running import MB, connected, sending, serving
from workers.flowd.daemon import FlowDaemon

OPTIONS = (
    *("--model", "demo", "--max-model-len", "512", "--kv-blocks", "64", "--shutdown-timeout", "0"),
    *("--kv-layers", "4", "--kv-token-bytes", "1024"),
)
BODY = completion(prompt=list(range(1, 306)), max_tokens=6, ignore_eos=True, seed=1, stream=True)


def text_of(events: list[str]) -> str:
    return "".join(json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]")


async def test_a_prefix_is_lent_in_its_turn_and_the_answer_is_the_same(fleet_token, monkeypatch, tmp_path) -> None:
    profile = slow_prefill(tmp_path, 0.007)  # computing takes longer than what is queued on the link before the copy

    def start(role: str, *more: str) -> EngineProcess:
        return EngineProcess(*OPTIONS, *profile, "--role", role, *more)

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a Unix socket's path is short
        path = f"{folder}/flowd.sock"
        monkeypatch.setenv("FLOW_SOCKET", path)
        async with serving(path) as daemon, connected(path) as other:
            with (
                await asyncio.to_thread(start, "prefill") as p,
                await asyncio.to_thread(start, "prefill", "--borrow-tokens", "64") as q,
                await asyncio.to_thread(start, "decode") as d,
            ):
                async with aiohttp.ClientSession(auto_decompress=False) as session:
                    decode = InstanceSpec("d", "demo", d.url, "reference", Role.DECODE)
                    first, second = (
                        InstanceSpec(name, "demo", engine.url, "reference", Role.PREFILL)
                        for name, engine in (("p", p), ("q", q))
                    )
                    await link(session, q.url, p.url, fleet_token)
                    async with ServerBed([first, decode], session) as bed:
                        computed = await bed.send(BODY).done()
                        assert bed.sink.records[0].prefill_instance == "p"
                    async with ServerBed([second, decode], session) as bed:
                        async with sending(other, due_in_s=3.0, size=150 * MB):
                            client = bed.send(BODY)
                            await until_on_loop(lambda: waiting(daemon))
                            (held,) = waiting(daemon)
                        reused = await client.done()
                        assert (computed.status, reused.status) == (200, 200)
                        assert text_of(reused.events) == text_of(computed.events)
                        assert bed.sink.records[0].prefill_instance == "q"
                    assert (held["stage"], held["size_bytes"]) == (FlowStage.REUSE, 304 * 4 * 1024)
                    figures = await figures_of(session, q.url)
                    assert figures["slackline_kv_borrowed_tokens"] == 304  # all whole blocks but the last token's
                    assert (await figures_of(session, p.url))["slackline_kv_held_seconds"] > 0.0


def waiting(daemon: FlowDaemon) -> list[dict[str, Any]]:
    """Fetches of prefixes that may not send now."""
    return [each for each in daemon.status()["flows"] if each["stage"] == FlowStage.REUSE and not each["go"]]


async def link(session: aiohttp.ClientSession, borrower: str, source: str, token: str) -> None:
    """As the job that keeps links between prefill and decode engines does it."""
    async with session.get(f"{source}/links") as answer:
        at = (await answer.json())["at"]
    peers = {"id": "q", "peers": [{"id": "p", **at}], "wait_s": 5.0, "token": token}
    status, _ = await post(session, f"{borrower}/links", peers)
    assert status == 200

    async def up() -> bool:
        async with session.get(f"{borrower}/links") as answer:
            return (await answer.json())["peers"][0]["state"] == "up"

    await until_on_loop(up)


async def figures_of(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
