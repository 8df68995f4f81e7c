"""A prefill whose connection breaks once the decode engine has said that it has all of its KV: nothing starts over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from controller.core.kv_links import KvMoved
from tests.api.openai.disaggregation.disaggregated import (
    Gate,
    both_at_work,
    fleet,
    kinds,
    left_outstanding,
    tells,
    transfers,
)
from tests.api.openai.gateways import TestBed, completion, settled
from tests.waiting import until_on_loop
from workers.backends.base import AnswerChunk, EngineError, UpstreamCall
from workers.backends.fake import Script

MOVED = KvMoved(bytes=4096, layers=2, tokens=3, seconds=0.25, reserved=True, early_bytes=2048)
SLOW = Script(first_delay_s=0.1, moved=MOVED)


def landed(bed: TestBed) -> bool:
    """The decode engine has said so."""
    return any(in_flight.moved is not None for in_flight in bed.gateway.runtime.requests.values())


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_decode_stage_goes_on(streamed: bool) -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        gate, decode = Gate(bed.backend("p")), tells(bed, "d")
        bed.backend("d", SLOW)
        client = bed.send(completion(stream=streamed))
        await until_on_loop(lambda: landed(bed))
        gate.fails()
        answer = await client.done()
        assert (answer.status, b"t3" in answer.body) == (200, True)
        assert (gate.calls, len(decode.calls), decode.aborted) == (1, 1, [])
        assert [kind for kind, _ in kinds(bed)].count("dispatch") == 1
        (one,) = transfers(bed)
        assert (one["outcome"], one["state"]) == ("done", "released")
        (record,) = bed.sink.records
        assert (record.outcome, record.instance, record.prefill_instance, record.attempts) == ("ok", "d", "p", 1)
        assert await left_outstanding(bed) == 0


async def test_after_the_first_token_its_prefill_engine_is_free_at_once() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        client, gate = await both_at_work(bed, Script(moved=MOVED, hang_after=1))
        await until_on_loop(lambda: b"t0" in client.answer.body)
        dispatcher, clock = bed.gateway.scheduler.dispatcher, bed.gateway.runtime.clock
        assert sum(state.waiting + state.running for state in dispatcher.fleet(clock())) == 1
        gate.fails()
        await until_on_loop(lambda: sum(state.waiting + state.running for state in dispatcher.fleet(clock())) == 0)
        assert not client.task.done()
        await client.hang_up()
        assert await left_outstanding(bed) == 0


async def test_an_engine_that_cannot_be_reached_is_looked_at_all_the_same() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        suspects: list[str] = []
        bed.gateway.runtime._suspect = suspects.append
        client, gate = await both_at_work(bed, SLOW)
        await until_on_loop(lambda: landed(bed))
        gate.fails()
        assert (await client.done()).status == 200
        assert suspects == ["p"]


async def test_one_that_is_found_dead_in_the_same_moment_takes_nothing_with_it() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        runtime = bed.gateway.runtime
        runtime._suspect = lambda name: runtime.instance_down(name, "test")
        client, gate = await both_at_work(bed, SLOW)
        await until_on_loop(lambda: landed(bed))
        gate.fails()
        assert (await client.done()).status == 200
        assert (gate.calls, len(bed.backend("d").calls), await left_outstanding(bed)) == (1, 1, 0)


async def test_where_the_engine_does_not_say_so_nothing_is_assumed() -> None:
    """Of such a whole answer the migrator takes the KV for landed at once; it may have been cut at any layer."""
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        gates = {name: Gate(bed.backend(name)) for name in "pq"}
        decode = bed.backend("d", Script(hang_after=0), Script())
        client = bed.send(completion())
        await until_on_loop(lambda: decode.running == 1)
        first = next(name for name, gate in gates.items() if gate.calls)
        gates[first].fails()
        other = gates["q" if first == "p" else "p"]
        await until_on_loop(lambda: other.calls == 1)
        other.ends()
        assert ((await client.done()).status, len(decode.aborted)) == (200, 1)


async def test_a_decode_engine_lost_after_that_is_followed_by_a_new_prefill() -> None:
    """The KV is nowhere any more: it is not asked for at the prefill engine again."""
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        decode = bed.backend("d")
        real, broken = decode.generate, asyncio.Event()

        async def breaks(call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
            decode.generate = real
            async for chunk in real(call):
                yield chunk
                await broken.wait()
                raise EngineError("gone", unreachable=True)

        decode.generate = breaks
        client, first, other = await both_at_work(bed, Script(moved=MOVED), Script())
        await until_on_loop(lambda: landed(bed))
        first.fails()
        await settled()
        broken.set()
        await until_on_loop(lambda: first.calls + other.calls == 2)
        if other.calls:
            other.ends()
            assert (await client.done()).status == 200
        else:
            await client.hang_up()
        assert ("place", "decode_failed") in kinds(bed)
