"""What is noted of each KV transfer, and that KV nobody needs is freed at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api.openai import status
from api.openai.kv_transfers import moved_in
from api.openai.state.telemetry import LinkWatch
from controller.core import events as ev
from controller.core.kv_links import KvMoved, LinkReport, LinkState
from tests.api.openai.disaggregation.disaggregated import STREAMED, fleet, freed, patience, reads, transfers
from tests.api.openai.gateways import TestBed, completion
from tests.waiting import until_on_loop
from workers.backends.base import EngineError
from workers.backends.fake import FakeBackend, Script

MOVED = KvMoved(bytes=4096, layers=2, tokens=3, seconds=0.25, busy_s=0.1, reserved=True)
CUT = (
    b'{"error":{"message":"KV transfer failed (cut): gone","type":"InternalServerError","param":"kv_transfer_params",'
    b'"code":502,"kv":{"bytes":2048,"layers":1,"tokens":3,"cached":0,"seconds":0.2,"busy_s":0.0,"reserved":true,'
    b'"reason":"cut"}}}'
)


def fails_once(backend: FakeBackend, error: EngineError) -> None:
    """Its next answer."""
    real = backend.generate

    async def generate(call: Any) -> Any:
        backend.generate = real
        backend.calls.append(call)
        raise error
        yield

    backend.generate = generate


# ---- notes ----------------------------------------------------------------------------------------------------------


async def test_one_that_its_engine_measured() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(moved=MOVED))
        await bed.ask(STREAMED)
        (one,) = transfers(bed)
        assert (one["reason"], one["outcome"], one["state"]) == ("kv_landed", "done", "released")
        assert (one["source"], one["instance"], one["attempt"]) == ("p", "d", 1)
        assert (one["bytes"], one["layers"], one["seconds"], one["overlap_s"]) == (4096, 2, 0.25, 0.1)
        assert one["measured_by"] == "engine"
        assert await freed(bed, "p") == [], "the engine that pulled has said that it has it all"


async def test_one_of_a_whole_answer_that_its_engine_measured_and_told_only_with_the_answer() -> None:
    """As vLLM with Slackline's connector does: its headers come when all is computed."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(moved=MOVED._replace(flow="scheduled", held_s=0.2, level=2, promotions=1)))
        answer = await bed.ask(completion())
        assert answer.status == 200
        (one,) = transfers(bed)
        assert (one["outcome"], one["state"], one["measured_by"], one["bytes"]) == ("done", "released", "engine", 4096)
        assert (one["flow"], one["held_s"], one["flow_level"], one["promotions"]) == ("scheduled", 0.2, 2, 1)


@pytest.mark.parametrize(("said", "recorded"), [("", ""), ("no data", ": no data"), ("x" * 999, ": " + "x" * 300)])
@pytest.mark.parametrize("body", [STREAMED, completion()])
async def test_one_whose_kv_was_computed_by_the_decode_engine_did_not_arrive(
    body: Any, said: str, recorded: str
) -> None:
    """As vLLM with Slackline's connector does when a load fails: the answer goes on."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(moved=KvMoved(seconds=0.25, reason="cut", error=said)))
        answer = await bed.ask(body)
        assert answer.status == 200
        (one,) = transfers(bed)
        assert (one["reason"], one["outcome"], one["state"]) == ("cut", "failed", "placed")
        assert (one["measured_by"], one["seconds"], one["bytes"]) == ("engine", 0.25, 0)
        assert one["error"] == "the decode instance computed the prompt itself" + recorded
        assert bed.gateway.runtime.transfers.moved == 0
        assert await freed(bed, "p") == [bed.sink.records[0].id]


async def test_one_that_no_one_measured_is_timed_here_and_its_kv_freed() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(first_delay_s=0.02, token_delay_s=0.04))
        await bed.ask(STREAMED)
        (one,) = transfers(bed)
        assert (one["measured_by"], one["outcome"], one["state"]) == ("gateway", "done", "released")
        assert one["seconds"] == one["after_s"] >= 0.02
        assert "bytes" not in one
        assert await freed(bed, "p") == [bed.sink.records[0].id]


async def test_of_a_whole_answer_nothing_is_freed_before_it_is_there() -> None:
    """Nobody sees when its KV has landed: freed at the placement, the decode engine would find none."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(first_delay_s=0.3, tokens=2))
        client = bed.send(completion())
        await until_on_loop(lambda: bed.backend("d").running == 1)
        assert await freed(bed, "p") == []
        answer = await client.done()
        assert answer.status == 200
        assert await freed(bed, "p") == [bed.sink.records[0].id]
        (one,) = transfers(bed)
        assert (one["outcome"], one["seconds"] >= 0.3) == ("done", True)


async def test_one_cut_on_the_way_and_the_one_that_arrives() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        for name in "de":
            bed.backend(name, Script(moved=MOVED))
        fails_once(bed.backend("d"), EngineError("the engine answered 502", status=502, body=CUT))
        answer = await bed.ask(STREAMED)
        assert answer.status == 200
        cut, done = transfers(bed)
        assert (cut["reason"], cut["outcome"], cut["state"], cut["attempt"]) == ("cut", "failed", "moving", 1)
        assert (cut["bytes"], cut["layers"], cut["measured_by"]) == (2048, 1, "engine")
        assert "gone" in cut["error"]
        assert (done["outcome"], done["instance"], done["attempt"]) == ("done", "e", 2)


async def test_no_room_reaches_no_further_than_the_placement() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(refuse_status=503), Script(moved=MOVED))
        await bed.ask(STREAMED)
        first, second = transfers(bed)
        assert (first["reason"], first["state"], second["state"]) == ("no_room", "placed", "released")


async def test_an_overdue_one_is_rolled_back_and_reported() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        patience(bed, moving_timeout_s=0.05)
        bed.backend("d", Script(hang_after=0), Script())
        answer = await bed.ask(STREAMED)
        assert answer.status == 200
        undone, done = transfers(bed)
        assert (undone["reason"], undone["undo"], undone["outcome"]) == ("moving_timeout", "moving_timeout", "undone")
        assert (done["outcome"], done["instance"]) == ("done", "e")


async def test_a_client_that_hangs_up_undoes_it_and_frees_the_kv() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(hang_after=0))
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.backend("d").running == 1)
        await client.hang_up()
        (one,) = transfers(bed)
        assert (one["outcome"], one["undo"]) == ("undone", "request_ended")
        assert await freed(bed, "p") == [bed.sink.records[0].id]


async def test_a_client_that_hangs_up_during_the_prefill_frees_what_it_may_have_left() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("p", Script(hang_after=0))
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.backend("p").running == 1)
        await client.hang_up()
        assert transfers(bed) == []
        assert await freed(bed, "p") == [bed.sink.records[0].id]


async def test_one_that_is_given_up_frees_its_kv() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(refuse_status=500))
        answer = await bed.ask(STREAMED)
        assert answer.status == 503
        tried = transfers(bed)
        assert [one["attempt"] for one in tried] == list(range(1, len(tried) + 1))
        assert {one["outcome"] for one in tried} == {"failed"}
        assert await freed(bed, "p") == [bed.sink.records[0].id]


async def test_an_engine_that_does_not_hear_of_it_changes_nothing() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:

        async def deaf(names: Any) -> None:
            raise EngineError("gone", unreachable=True)

        bed.backend("p").free_kv = deaf
        bed.backend("d", Script(token_delay_s=0.04))
        answer = await bed.ask(STREAMED)
        (one,) = transfers(bed)
        assert (answer.status, one["state"]) == (200, "committed")


def test_an_error_that_says_nothing_of_kv() -> None:
    assert moved_in(b"") is None
    assert moved_in(b"<html>") is None
    assert moved_in(b'{"error":"x"}') is None
    assert moved_in(CUT) == KvMoved(2048, 1, 3, 0, 0.2, 0.0, True, "cut")


# ---- links ----------------------------------------------------------------------------------------------------------


def down(peer: str) -> LinkReport:
    return LinkReport(peer, LinkState.DOWN, last_error="cut", host="h", port=1)


def test_only_news_is_told() -> None:
    told: list[ev.LinkSeen] = []
    watch = LinkWatch(told.append)
    up = LinkReport("p", LinkState.UP, 0.001, 1e9)
    watch.reported("d", [up, LinkReport("", LinkState.UP)])
    watch.reported("d", [up._replace(bandwidth_bytes_s=1.1e9, bytes=7)])
    assert told == [ev.LinkSeen("p", "d", LinkState.UP, 1e9, 0.001)]
    watch.reported("d", [up._replace(bandwidth_bytes_s=2e9)])
    watch.reported("d", [down("p")])
    assert [(seen.state, seen.bandwidth_bytes_s) for seen in told[1:]] == [(LinkState.UP, 2e9), (LinkState.DOWN, None)]
    watch.keep(["p", "d"])
    watch.reported("d", [down("p")])
    assert len(told) == 3
    for there in (["d"], ["p", "d"]):
        watch.keep(there)
        watch.reported("d", [down("p")])
    assert len(told) == 4, "p was gone, and what was known of its links with it"


async def test_a_link_that_is_down_is_not_used_and_shown() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        bed.backend("d").link_reports = [down("p")]
        await bed.gateway.monitor.round()
        await bed.gateway.monitor.settle(1)
        await asyncio.sleep(0)
        for _ in range(3):
            assert (await bed.ask(STREAMED)).headers["x-slackline-instance"] == "e"
        (link,) = [each for each in status.links(bed.gateway, bed.gateway.clock()) if each["state"] == "down"]
        assert (link["source"], link["target"], link["closed"]) == ("p", "d", False)
        told = {
            (name, where["target"]): value for name, _, where, value in status.gauges(bed.gateway) if "target" in where
        }
        assert told["link_usable", "d"] == 0.0
        assert told["link_usable", "e"] == 1.0


async def test_with_every_link_of_its_prefill_engine_down_another_one_prefills() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        bed.backend("d").link_reports = [down("p")]
        await bed.gateway.monitor.round()
        await bed.gateway.monitor.settle(1)
        await asyncio.sleep(0)
        answers = [await bed.ask(STREAMED) for _ in range(4)]
        assert {answer.status for answer in answers} == {200}
        assert len(bed.backend("q").calls) == 4
        in_vain = len(bed.backend("p").calls)
        assert len(await freed(bed, "p")) == in_vain > 0, "what p prefilled in vain it need not keep"


# ---- traffic by stage -----------------------------------------------------------------------------------------------


async def test_each_stage_has_its_own_traffic() -> None:
    """Twelve arrive, all are prefilled, four are decoded so far: prefill keeps up, decode does not."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        for _ in range(4):
            await bed.ask(STREAMED)
        bed.backend("d", Script(hang_after=1))
        clients = [bed.send(STREAMED) for _ in range(8)]
        await until_on_loop(lambda: bed.backend("d").running == 8)
        stages = status.fleet_message(bed.gateway, 1, [])["models"]["demo"]["stages"]
        assert (stages["prefill"]["arrival_rate"], stages["prefill"]["service_rate"]) == (1.2, 1.2)
        assert (stages["decode"]["arrival_rate"], stages["decode"]["service_rate"]) == (1.2, 0.4)
        for client in clients:
            await client.hang_up()


async def test_what_collocated_instances_take_is_no_demand_for_prefill() -> None:
    async with TestBed(fleet(p="prefill", d="decode", c="collocated")) as bed:
        for _ in range(10):
            await bed.ask(STREAMED)
        prompts = len(bed.backend("p").calls)
        stages = status.fleet_message(bed.gateway, 1, [])["models"]["demo"]["stages"]
        assert 0 < prompts < 10
        assert stages["prefill"]["arrival_rate"] == prompts / 10


async def test_a_prefill_that_is_turned_away_is_sent_once() -> None:
    """Nobody reads what p computes: of all that is sent there but the first, only the second sending counts."""
    async with TestBed(fleet(p="prefill", q="prefill", d="decode", c="collocated")) as bed:
        reads(bed, "d", "q")
        for _ in range(20):
            assert (await bed.ask(STREAMED)).status == 200
        calls = {name: len(bed.backend(name).calls) for name in "pqc"}
        assert calls["p"] == 1
        stages = status.fleet_message(bed.gateway, 1, [])["models"]["demo"]["stages"]
        share = (calls["p"] + calls["q"]) / sum(calls.values())
        assert stages["prefill"]["arrival_rate"] == pytest.approx(2.0 * share)


async def test_a_collocated_fleet_tells_no_stages() -> None:
    async with TestBed(fleet(a="collocated")) as bed:
        await bed.ask(STREAMED)
        assert "stages" not in status.fleet_message(bed.gateway, 1, [])["models"]["demo"]
