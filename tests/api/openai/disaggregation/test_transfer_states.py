"""What sticks between two engines, through the gateway: undone in time, said in the record, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from api.openai import status
from controller.core.types import InstanceSpec, Role
from controller.dispatch.lifecycle import State
from tests.api.openai.disaggregation.disaggregated import (
    STREAMED,
    both_at_work,
    fleet,
    freed,
    kinds,
    left_outstanding,
    patience,
    transfers,
)
from tests.api.openai.gateways import TestBed, completion
from tests.api.openai.servers import ServerBed
from tests.waiting import until_on_loop
from tests.workers.engine.client import samples
from tests.workers.engine.process import EngineProcess
from workers.backends.base import AnswerChunk, EngineError, PrefillAnswer, UpstreamCall
from workers.backends.fake import FakeBackend, Script


class Stuck:
    """A prefill that never says a word."""

    def __init__(self, backend: FakeBackend) -> None:
        self.calls = self.aborted = 0
        backend.prefill = self.prefill

    async def prefill(self, call: UpstreamCall, ending: Callable[[bytes], None] | None = None) -> PrefillAnswer:
        self.calls += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        raise AssertionError


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_that_sticks_before_its_offer_is_aborted_and_computed_elsewhere(stream: bool) -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        patience(bed, prefilling_timeout_s=0.2)
        stuck = Stuck(bed.backend("p"))
        answers = [await client.done() for client in [bed.send(completion(stream=stream)) for _ in range(4)]]
        assert [answer.status for answer in answers] == [200] * 4
        assert stuck.calls == stuck.aborted > 0
        again = [r for r in bed.sink.records if ("place", "prefilling_timeout") in _steps(r)]
        assert len(again) == stuck.calls
        assert {(r.prefill_instance, r.instance, r.outcome) for r in again} == {("q", "d", "ok")}
        assert set(await freed(bed, "p")) >= {r.id for r in again}
        assert await left_outstanding(bed) == 0


async def test_where_every_prefill_sticks_the_client_gets_an_error() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        patience(bed, prefilling_timeout_s=0.05)
        stuck = Stuck(bed.backend("p"))
        answer = await bed.ask(STREAMED)
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
        assert stuck.calls == stuck.aborted == 3
        assert await left_outstanding(bed) == 0


async def test_a_prefill_that_sticks_after_its_offer_takes_its_decode_stage_with_it() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        patience(bed, prefilling_timeout_s=0.2)
        client, first, other = await both_at_work(bed, Script(hang_after=0), Script())
        await until_on_loop(lambda: other.calls == 1)
        assert (first.aborted, bed.backend("d").aborted) == (1, [bed.backend("d").calls[0].request_id])
        other.ends()
        assert (await client.done()).status == 200
        undone, done = transfers(bed)
        assert (undone["reason"], undone["outcome"], done["outcome"]) == ("prefilling_timeout", "undone", "done")
        assert ("place", "prefilling_timeout") in kinds(bed)
        assert await freed(bed, first.backend.spec.id) == [bed.sink.records[0].id]
        assert await left_outstanding(bed) == 0


def pulls(backend: FakeBackend, *chunks: AnswerChunk) -> list[str]:
    """An engine that says when it pulls; it answers a decode with these and then sticks. Whose calls it saw aborted."""
    backend.capabilities = replace(backend.capabilities, tells_pulling=True)
    aborted: list[str] = []

    async def generate(call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        try:
            for chunk in chunks:
                yield chunk
            await asyncio.Event().wait()
        finally:
            aborted.append(call.request_id)

    backend.generate = generate
    return aborted


@pytest.mark.parametrize(
    ("chunks", "reason", "state"),
    [
        ((), "placed_timeout", "placed"),
        ((AnswerChunk("accepted"),), "reserved_timeout", "reserved"),
        ((AnswerChunk("accepted"), AnswerChunk("data", pulling=True)), "moving_timeout", "moving"),
    ],
)
async def test_a_decode_engine_that_sticks_is_told_and_another_one_pulls(
    chunks: Sequence[AnswerChunk], reason: str, state: str
) -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        patience(bed, placed_timeout_s=0.1, reserved_timeout_s=0.1, moving_timeout_s=0.1)
        aborted = pulls(bed.backend("d"), *chunks)
        answer = await bed.ask(STREAMED)
        assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "e")
        undone, done = transfers(bed)
        assert (undone["reason"], undone["undo"], undone["state"]) == (reason, reason, state)
        assert done["outcome"] == "done"
        assert aborted == [bed.sink.records[0].id]
        assert len(bed.backend("p").calls) == 1, "the KV was kept for the other"
        assert await left_outstanding(bed) == 0


async def test_an_engine_is_believed_to_move_once_it_says_so() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        pulls(bed.backend("d"), AnswerChunk("accepted"), AnswerChunk("data", pulling=True))
        client = bed.send(STREAMED)
        migrator, requests_in_flight = bed.gateway.scheduler.migrator, bed.gateway.runtime.requests
        await until_on_loop(lambda: [migrator.state_of(name) for name in requests_in_flight] == [State.MOVING])
        await client.hang_up()
        assert transfers(bed)[0]["state"] == "moving"


async def test_a_decode_engine_that_is_always_full_ends_as_an_error_not_as_waiting() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        patience(bed, waiting_timeout_s=0.3)
        bed.backend("d", Script(refuse_status=503))
        answer = await bed.ask(STREAMED)
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
        assert ("place", "waiting_timeout") in kinds(bed)
        assert await freed(bed, "p") == [bed.sink.records[0].id]
        assert await left_outstanding(bed) == 0


async def test_through_real_engines_a_prefill_that_sticks_while_it_is_pulled_leaves_no_block_taken(fleet_token) -> None:
    """Its only step takes 3 s; the decode engine has reserved, and is told each second that it is still computed."""
    options = ("--model", "demo", "--max-model-len", "512", "--kv-blocks", "64", "--no-enable-prefix-caching")
    options = (*options, "--kv-layers", "4", "--kv-token-bytes", "1024", "--shutdown-timeout", "0")
    options = (*options, "--scheduler", "continuous")  # offers KV when the step begins
    with (
        EngineProcess(*options, "--profile", "constant:3s", "--role", "prefill") as p,
        EngineProcess(*options, "--profile", "constant:2ms", "--role", "prefill") as q,
        EngineProcess(*options, "--profile", "constant:2ms", "--role", "decode") as d,
    ):
        roles = {"p": (p, Role.PREFILL), "q": (q, Role.PREFILL), "d": (d, Role.DECODE)}
        specs = [InstanceSpec(name, "demo", each.url, "reference", role) for name, (each, role) in roles.items()]
        async with aiohttp.ClientSession(auto_decompress=False) as session, ServerBed(specs, session) as bed:
            patience(bed, prefilling_timeout_s=0.5)
            body = completion(prompt=list(range(1, 301)), max_tokens=6, ignore_eos=True, stream=True)
            answers = [await client.done() for client in [bed.send(body) for _ in range(2)]]
            assert [answer.status for answer in answers] == [200, 200]
            stuck = [r for r in bed.sink.records if ("place", "prefilling_timeout") in _steps(r)]
            assert {(r.prefill_instance, r.instance, r.outcome) for r in stuck} == {("q", "d", "ok")}
            for record in stuck:
                undone, done = (step["figures"] for step in record.decisions if step["kind"] == "transfer")
                assert (undone["undo"], undone["state"]) == ("prefilling_timeout", "moving")
                assert done["state"] == "released"
            for each, _ in roles.values():
                async with aiohttp.ClientSession(each.url) as engine, asyncio.timeout(10.0):
                    while (await samples(engine))["vllm:kv_cache_usage_perc", ""]:
                        await asyncio.sleep(0.1)


# ---- releases -------------------------------------------------------------------------------------------------------


def deaf(backend: FakeBackend, times: int) -> list[list[str]]:
    """Does not hear the first `times` releases; what it was told."""
    told: list[list[str]] = []

    async def free_kv(names: Sequence[str]) -> None:
        told.append([*names])
        if len(told) <= times:
            raise EngineError("no answer")

    backend.free_kv = free_kv
    return told


async def test_a_release_that_was_not_heard_is_told_again() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        patience(bed, release_timeout_s=0.1)
        told = deaf(bed.backend("p"), 2)
        bed.backend("d", Script(tokens=8, token_delay_s=0.1))
        await bed.ask(STREAMED)
        (record,), (one,) = bed.sink.records, transfers(bed)
        assert told == [[record.id]] * 3
        assert (one["state"], "undo" in one) == ("released", False)


async def test_one_that_is_never_heard_is_left_to_the_lease_and_the_record_says_so() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        patience(bed, release_timeout_s=0.1)
        told = deaf(bed.backend("p"), 99)
        bed.backend("d", Script(tokens=8, token_delay_s=0.1))
        answer = await bed.ask(STREAMED)
        (one,) = transfers(bed)
        assert (answer.status, one["outcome"], one["state"], one["undo"]) == (200, "done", "committed", "left_to_lease")
        assert len(told) == 3
        assert ("kv_left_to_lease", 1) in [(name, value) for name, _, _, value in status.gauges(bed.gateway)]
        assert not bed.gateway.scheduler.migrator.busy


async def test_a_release_goes_on_when_its_answer_is_over() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        patience(bed, release_timeout_s=0.1)
        told = deaf(bed.backend("p"), 1)
        await bed.ask(STREAMED)
        assert transfers(bed)[0]["state"] == "committed"
        await until_on_loop(lambda: len(told) == 2)
        await until_on_loop(lambda: not bed.gateway.scheduler.migrator.busy)


async def test_engines_that_free_by_themselves_are_not_asked() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        backend = bed.backend("p")
        backend.capabilities = replace(backend.capabilities, frees_kv=False)
        patience(bed, release_timeout_s=0.05)
        bed.backend("d", Script(tokens=4, token_delay_s=0.1))
        await bed.ask(STREAMED)
        assert (backend.freed, transfers(bed)[0]["state"]) == ([], "committed")
        assert bed.gateway.runtime.transfers.left_to_lease == 0


def _steps(record: Any) -> list[tuple[str, str]]:
    return [(step["kind"], step["reason"]) for step in record.decisions]
