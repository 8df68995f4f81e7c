"""A prefix that one prefill engine has computed, reused by another one: real engines behind a gateway, and the transfer
daemon that lets more urgent transfers go first."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from api.openai.in_flight import InFlightRequest, relay
from api.openai.kv_transfers import KvTransfers
from controller.core.decisions import Decision
from controller.core.kv_links import BorrowedKv, KvMoved
from controller.core.types import InstanceSpec, Request, Role, Targets
from controller.flow.flows import FlowStage
from tests.api.openai.gateways import completion
from tests.api.openai.servers import ServerBed
from tests.waiting import until_on_loop
from tests.workers.engine.client import post
from tests.workers.engine.kv.test_prefixes import slow_prefill
from tests.workers.engine.process import EngineProcess
from tests.workers.flowd.running import MB, connected, sending, serving
from workers.backends.base import AnswerChunk
from workers.backends.http import PREFIX_COMMENT, EventReader
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
                        (told,) = [each for each in bed.sink.records[0].decisions if each["kind"] == "prefix"]
                    assert (held["stage"], held["size_bytes"]) == (FlowStage.REUSE, 304 * 4 * 1024)
                    figures = await figures_of(session, q.url)
                    assert figures["slackline_kv_borrowed_tokens"] == 304  # all whole blocks but the last token's
                    held_s = (await figures_of(session, p.url))["slackline_kv_held_seconds"]
                    assert held_s > 0.0
                    copied = told["figures"]
                    assert (told["reason"], copied["outcome"], copied["flow"]) == ("prefix_copied", "done", "scheduled")
                    assert (copied["source"], copied["instance"]) == ("p", "q")
                    assert (copied["tokens"], copied["bytes"], copied["layers"]) == (304, 304 * 4 * 1024, 4)
                    assert copied["held_s"] == pytest.approx(held_s, abs=0.01)
                    assert copied["held_s"] < copied["seconds"] < 10.0


@pytest.mark.parametrize(
    ("moved", "reason", "outcome"),
    [
        (KvMoved(bytes=8, layers=1, seconds=3.0), "prefix_copied", "done"),
        (KvMoved(bytes=8, layers=1, seconds=3.0, reason="timeout", error="no layer came"), "timeout", "failed"),
        (KvMoved(reason="whatever an engine says"), "transfer_failed", "failed"),
    ],
)
def test_a_record_says_why_a_prefix_did_not_come(moved, reason, outcome) -> None:
    noted: list[Decision] = []
    host = SimpleNamespace(note=lambda _, decision: noted.append(decision))
    asked = SimpleNamespace(request=SimpleNamespace(id="r"))
    silent = moved._replace(flow="silent", held_s=2.5)
    KvTransfers(host, {}).borrowed(asked, "q", BorrowedKv("p", silent), 4.0)
    (told,) = noted
    assert (told.kind, told.reason, told.figures["outcome"]) == ("prefix", reason, outcome)
    assert (told.figures["flow"], told.figures["held_s"], told.figures["source"]) == ("silent", 2.5, "p")
    assert told.figures.get("error", "") == moved.error


def test_a_record_keeps_no_more_of_a_flows_name_than_engines_send() -> None:
    noted: list[Decision] = []
    host: Any = SimpleNamespace(note=lambda _, decision: noted.append(decision))
    asked: Any = SimpleNamespace(request=SimpleNamespace(id="r"))
    KvTransfers(host, {}).borrowed(asked, "q", BorrowedKv("p", KvMoved(flow="scheduled" * 100)), 4.0)
    assert noted[0].figures["flow"] == ("scheduled" * 100)[:40]


async def test_an_engine_that_repeats_what_it_borrowed_adds_one_step_to_the_record() -> None:
    async def nowhere(message: Any) -> None: ...

    async def generate(call: Any) -> AsyncIterator[AnswerChunk]:
        reader = EventReader(chat=False, keep_usage=False)
        for number in range(1000):
            told = json.dumps(BorrowedKv(f"p{number}", KvMoved(bytes=8)).as_json()).encode()
            chunk = reader.feed(PREFIX_COMMENT + told + b"\n\n")
            assert chunk is not None
            assert chunk.borrowed is not None
            yield chunk

    request = Request("r", 100.0, Targets(2.0, 0.1), 500, 4)
    asked = InFlightRequest(request, b"{", nowhere, 0.0, chat=False, streamed=True, keep_usage=False)
    host: Any = SimpleNamespace(note=InFlightRequest.note)
    driver: Any = SimpleNamespace(transfers=KvTransfers(host, {}), clock=lambda: 101.0)
    backend: Any = SimpleNamespace(generate=generate)
    call: Any = None
    await relay(asked, backend, call, driver)
    assert [step["figures"]["source"] for step in asked.decisions or ()] == ["p0"]


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


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_record_of_an_answer_from_one_instance_has_its_prefix_too(fleet_token, tmp_path, streamed) -> None:
    """Without a transfer daemon nothing holds it."""
    profile = slow_prefill(tmp_path, 0.007)
    body = BODY | {"stream": streamed}
    with (
        await asyncio.to_thread(EngineProcess, *OPTIONS, *profile) as p,
        await asyncio.to_thread(EngineProcess, *OPTIONS, *profile, "--borrow-tokens", "64") as q,
    ):
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            await link(session, q.url, p.url, fleet_token)
            answers = []
            for name, engine in (("p", p), ("q", q)):
                async with ServerBed([InstanceSpec(name, "demo", engine.url, "reference")], session) as bed:
                    answers.append(await bed.send(body).done())
                    record = bed.sink.records[0]
            assert [answer.status for answer in answers] == [200, 200]
            assert not streamed or text_of(answers[0].events) == text_of(answers[1].events)
            assert b"kv-prefix" not in answers[1].body
            (told,) = [each for each in record.decisions if each["kind"] == "prefix"]
            assert (told["reason"], told["figures"]["source"], told["figures"]["tokens"]) == ("prefix_copied", "p", 304)
            assert "held_s" not in told["figures"]
