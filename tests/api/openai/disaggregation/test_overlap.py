"""Decode stages that begin while their prompt is computed, through the gateway."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from controller.core.kv_links import KvMoved
from controller.core.types import InstanceSpec, Role
from tests.api.openai.disaggregation.disaggregated import (
    STREAMED,
    Gate,
    both_at_work,
    fleet,
    freed,
    kinds,
    left_outstanding,
    outstanding,
    transfers,
    transfers_so_far,
)
from tests.api.openai.gateways import TestBed, completion, settled
from tests.api.openai.servers import ServerBed
from tests.waiting import until_on_loop
from tests.workers.engine.client import kv_has_come, kv_received
from tests.workers.engine.held import PrefillGate
from tests.workers.engine.process import EngineProcess
from tests.workers.flowd.running import connected, sending, serving
from workers.backends.fake import Script

EARLY = Script(tokens=1, early=True, first_delay_s=0.05)
MOVED = KvMoved(bytes=4096, layers=2, tokens=3, seconds=0.25, reserved=True, early_bytes=2048)


async def test_the_decode_engine_is_asked_while_the_prefill_runs() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        client, gate = await both_at_work(bed, Script(first_delay_s=0.05))
        assert not gate.end.done()
        (call,) = bed.backend("d").calls
        assert call.offer == b'{"early":"p"}'
        gate.ends()
        answer = await client.done()
        assert answer.status == 200
        assert [kind for kind, _ in kinds(bed)] == ["slo", "dispatch", "place", "prefill", "transfer"]
        (record,) = bed.sink.records
        assert (record.outcome, record.instance, record.prefill_instance) == ("ok", "d", "p")
        assert await left_outstanding(bed) == 0


async def test_of_what_moved_early_the_record_says_how_much() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("p", EARLY)
        bed.backend("d", Script(first_delay_s=0.1, moved=MOVED))
        await bed.ask(STREAMED)
        (one,) = transfers(bed)
        assert (one["bytes"], one["early_bytes"], one["state"]) == (4096, 2048, "released")


async def test_of_a_transfer_that_was_held_the_record_says_for_how_long_and_its_promotions() -> None:
    held = MOVED._replace(held_s=0.2, promotions=3, level=2, flow="scheduled")
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("p", EARLY)
        bed.backend("d", Script(first_delay_s=0.1, moved=held))
        await bed.ask(STREAMED)
        (one,) = transfers(bed)
        assert (one["flow"], one["held_s"], one["promotions"], one["flow_level"]) == ("scheduled", 0.2, 3, 2)
        bed.backend("d", Script(first_delay_s=0.1, moved=MOVED))
        await bed.ask(STREAMED)
        assert "flow" not in transfers(bed)[-1], "an engine without flow scheduling says nothing of it"


async def test_the_decode_engine_is_told_how_much_of_the_ttft_has_passed_when_it_is_asked() -> None:
    """The wait for the prefill counts: the KV transfer's turn on a shared link goes by what is left."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("p", Script(tokens=1, first_delay_s=0.3))
        assert (await bed.ask(STREAMED)).status == 200
        (prefill,), (decode,) = bed.backend("p").calls, bed.backend("d").calls
        assert prefill.targets.waited_s < 0.25
        assert 0.3 <= decode.targets.waited_s < 5.0
        assert decode.targets.ttft_s == prefill.targets.ttft_s


async def test_without_overlap_it_is_placed_when_the_prefill_has_ended() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        migrator = bed.gateway.scheduler.migrator
        migrator.config = replace(migrator.config, overlap=False)
        gate = Gate(bed.backend("p"))
        client = bed.send(STREAMED)
        await until_on_loop(lambda: gate.calls == 1)
        await settled()
        assert not bed.backend("d").calls
        gate.ends()
        assert (await client.done()).status == 200
        assert bed.backend("d").calls[0].offer == b'{"whole":"p"}'


async def test_a_whole_answer_overlaps_too() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("p", EARLY)
        bed.backend("d", Script(first_delay_s=0.1))
        answer = await bed.ask(completion())
        assert (answer.status, b"t0 t1 t2 t3" in answer.body) == (200, True)
        assert await left_outstanding(bed) == 0


async def test_a_decode_engine_lost_when_all_has_landed_and_its_prefill_has_not_ended_is_left_once() -> None:
    """Told to the dispatcher twice, the request stood in its queue twice."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        gate = Gate(bed.backend("p"))
        decode = bed.backend("d", Script(cut_after=0, moved=MOVED), Script())
        decode.capabilities = replace(decode.capabilities, tells_landing=True)
        client = bed.send(completion())
        (in_flight,) = (await until_on_loop(lambda: bed.gateway.runtime.requests, every_s=0)).values()
        await until_on_loop(lambda: gate.calls == 2)  # its answer may be whole by then
        assert in_flight.request.attempts == 1
        assert not bed.gateway.scheduler.dispatcher.waiting(in_flight.request.id)
        gate.ends()
        assert (await client.done()).status == 200
        assert (gate.calls, await left_outstanding(bed)) == (2, 0)


async def test_a_prefill_that_fails_takes_its_decode_stage_with_it_and_both_start_over() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        client, first, other = await both_at_work(bed, Script(hang_after=0), Script())
        first.fails()
        await until_on_loop(lambda: other.calls == 1)
        other.ends()
        answer = await client.done()
        assert answer.status == 200
        assert len(bed.backend("d").aborted) == 1
        failed, done = transfers(bed)
        assert (failed["outcome"], failed["undo"], done["outcome"]) == ("undone", "prefill_failed", "done")
        assert await left_outstanding(bed) == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_engine_that_fails_meanwhile_is_replaced(stream: bool) -> None:
    """Of a stream the prefill goes on. A whole answer says nothing before its end: its KV may have been taken, and is
    computed again."""
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        gate = Gate(bed.backend("p"))
        bed.backend("d", Script(cut_after=0), Script(first_delay_s=0.05))
        bed.backend("e", Script(cut_after=0), Script(first_delay_s=0.05))
        client = bed.send(completion(stream=stream))
        await until_on_loop(lambda: len(bed.backend("d").calls) + len(bed.backend("e").calls) >= 2)
        gate.ends()
        assert (await client.done()).status == 200
        if stream:
            assert (gate.calls, gate.aborted) == (1, 0)


async def test_of_a_stream_only_the_decode_stage_is_placed_again() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        gate = Gate(bed.backend("p"))
        for name in "de":
            bed.backend(name, Script(cut_after=0), Script(hang_after=0))
        client = bed.send(STREAMED)
        await until_on_loop(
            lambda: bed.backend("d").running + bed.backend("e").running == 1 and len(transfers_so_far(bed)) >= 1
        )
        assert (gate.calls, gate.aborted) == (1, 0)
        await client.hang_up()
        assert gate.aborted == 1


async def test_a_first_token_that_is_the_last_needs_no_decode_stage() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        client, gate = await both_at_work(bed, Script(hang_after=0))
        gate.ends(done=True)
        answer = await client.done()
        assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "p")
        await until_on_loop(lambda: bed.backend("d").running == 0)
        (record,) = bed.sink.records
        assert (record.instance, record.prefill_instance) == ("p", "")
        assert await left_outstanding(bed) == 0


async def test_a_client_that_hangs_up_aborts_both_stages_and_frees_the_kv() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        client, gate = await both_at_work(bed, Script(hang_after=0))
        await client.hang_up()
        await until_on_loop(lambda: bed.backend("d").running == 0)
        assert gate.aborted == 1
        assert await freed(bed, "p") == [bed.sink.records[0].id]
        assert outstanding(bed) == 0


@pytest.mark.parametrize("answers", [True, False])
async def test_a_prefill_engine_that_is_gone_starts_over_elsewhere_once(answers: bool) -> None:
    """Whether its connection breaks in the same moment or never."""
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        client, first, other = await both_at_work(bed, Script(hang_after=0), Script())
        if answers:
            first.fails()
        bed.gateway.runtime.instance_down(first.backend.spec.id, "test")
        await until_on_loop(lambda: other.calls == 1)
        other.ends()
        assert (await client.done()).status == 200
        assert other.calls == 1
        assert len(bed.sink.records) == 1
        assert await left_outstanding(bed) == 0


async def test_what_became_of_an_earlier_attempt_is_no_news_of_one_at_a_collocated_engine() -> None:
    """Its prefill engine breaks and is found dead in one moment, in which the request is sent whole to another one."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        client, gate = await both_at_work(bed, Script(hang_after=0))
        bed.gateway.configure(fleet(p="prefill", d="decode", c="collocated"))
        await bed.gateway.monitor.settle(1)
        bed.backend("c", Script(token_delay_s=0.02))
        runtime = bed.gateway.runtime
        runtime._suspect = lambda name: runtime.instance_down(name, "test")
        gate.fails()
        answer = await client.done()
        assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "c")
        assert (len(bed.backend("c").calls), bed.backend("c").aborted, len(bed.sink.records)) == (1, [], 1)
        assert await left_outstanding(bed) == 0


async def test_many_at_once_are_all_answered_once() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode", e="decode")) as bed:
        for name in "pq":
            bed.backend(name, replace(EARLY, first_delay_s=0.01))
        for name in "de":
            bed.backend(name, Script(first_delay_s=0.02))
        clients = [bed.send(completion(stream=bool(i % 2))) for i in range(40)]
        answers = [await client.done() for client in clients]
        assert {answer.status for answer in answers} == {200}
        assert len(bed.sink.records) == 40
        assert sum(len(bed.backend(name).calls) for name in "de") == 40
        assert await left_outstanding(bed) == 0


@pytest.mark.parametrize("scheduler", ["continuous", "slackline"])
async def test_through_real_engines_kv_moves_beside_its_prefill_and_the_answer_is_the_same(
    fleet_token, tmp_path: Path, scheduler: str
) -> None:
    kv = ("--kv-layers", "4", "--kv-token-bytes", "1024", "--no-enable-prefix-caching", "--shutdown-timeout", "0")
    options = ("--model", "demo", "--max-model-len", "512", "--kv-blocks", "64", *kv, "--scheduler", scheduler)
    body = completion(prompt=list(range(1, 301)), max_tokens=6, ignore_eos=True, seed=1)
    whole = 4 * 1024 * 300
    gate = PrefillGate(tmp_path)
    with (
        EngineProcess(*options, "--profile", "constant:20ms", "--role", "prefill", main=gate.options) as p,
        EngineProcess(*options, "--profile", "constant:2ms", "--role", "decode") as d,
    ):
        async with aiohttp.ClientSession(auto_decompress=False) as session, aiohttp.ClientSession(d.url) as decode:
            specs = [
                InstanceSpec("p", "demo", p.url, "reference", Role.PREFILL),
                InstanceSpec("d", "demo", d.url, "reference", Role.DECODE),
            ]
            async with ServerBed(specs, session) as bed:
                texts = []
                for stream in (True, False):
                    before = await kv_received(decode)
                    with gate.closed():
                        client = bed.send({**body, "stream": stream})
                        await kv_has_come(decode, before + whole * 3 / 4)
                    answer = await client.done()
                    assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "d")
                    events = [event for event in answer.events if event != "[DONE]"] if stream else [answer.body]
                    texts.append("".join(json.loads(event)["choices"][0]["text"] for event in events))
                    (one,) = transfers(bed)
                    assert (one["outcome"], one["measured_by"], one["tokens"]) == ("done", "engine", 300)
                    assert (one["early_bytes"], one["bytes"]) == (whole * 3 / 4, whole)
            async with session.post(f"{d.url}/v1/completions", json={**body, "model": "demo"}) as alone:
                texts.append((await alone.json())["choices"][0]["text"])
    assert len(set(texts)) == 1


async def test_through_real_engines_a_transfer_is_held_and_its_record_says_so(fleet_token, monkeypatch) -> None:
    """The deadline that decides is the gateway's: what is left of the TTFT when the decode engine is asked."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a Unix socket's path is short
        path = f"{folder}/flowd.sock"
        monkeypatch.setenv("FLOW_SOCKET", path)
        options = ("--model", "demo", "--max-model-len", "512", "--kv-blocks", "64", "--shutdown-timeout", "0")

        def start(role: str) -> EngineProcess:
            return EngineProcess(*options, "--profile", "constant:2ms", "--role", role)

        async with serving(path, "earliest_deadline") as daemon, connected(path) as other:
            with await asyncio.to_thread(start, "prefill") as p, await asyncio.to_thread(start, "decode") as d:
                async with aiohttp.ClientSession(auto_decompress=False) as session:
                    specs = [
                        InstanceSpec("p", "demo", p.url, "reference", Role.PREFILL),
                        InstanceSpec("d", "demo", d.url, "reference", Role.DECODE),
                    ]
                    async with ServerBed(specs, session) as bed:
                        async with sending(other, due_in_s=0.1):
                            client = bed.send(completion(prompt=list(range(1, 301)), stream=True))
                            await until_on_loop(lambda: len(daemon.status()["flows"]) == 2)
                            (held,) = [flow for flow in daemon.status()["flows"] if not flow["go"]]
                            (in_flight,) = bed.gateway.runtime.requests.values()
                            passed = in_flight.request.targets.ttft_s - held["due_in_s"]
                            now = bed.gateway.runtime.clock()
                            assert passed == pytest.approx(now - in_flight.request.arrival, abs=0.5)
                            await asyncio.sleep(1.5)
                        assert (await client.done()).status == 200
                        (one,) = transfers(bed)
        assert (one["outcome"], one["flow"]) == ("done", "scheduled")
        assert one["held_s"] > 1.0
