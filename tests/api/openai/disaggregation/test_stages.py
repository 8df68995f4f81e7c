"""Prefill on one engine, decode on another, through the gateway; and everything that can break between the two."""

from __future__ import annotations

import asyncio

import pytest

from api.openai import status
from controller.core import events as ev
from controller.dispatch.lifecycle import State
from tests.api.openai.disaggregation.disaggregated import STREAMED, fleet, kinds, left_outstanding, patience
from tests.api.openai.gateways import TestBed, completion
from tests.waiting import until_on_loop
from workers.backends.fake import Script


async def test_a_prompt_is_prefilled_here_and_decoded_there() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        answer = await bed.ask(STREAMED)
        assert answer.status == 200
        assert [event for event in answer.events if "t3" in event]
        (first,), (second,) = bed.backend("p").calls, bed.backend("d").calls
        assert (first.offer, second.offer) == (b"", b'{"from":"p"}')
        assert first.request_id == second.request_id
        assert answer.headers["x-slackline-instance"] == "d"
        (record,) = bed.sink.records
        assert (record.outcome, record.instance, record.output_tokens) == ("ok", "d", 4)
        assert record.prefill_instance == "p"
        assert [kind for kind, _ in kinds(bed)] == ["slo", "dispatch", "prefill", "place", "transfer"]
        assert bed.gateway.runtime.transfers.moved == 1


async def test_a_whole_answer_goes_the_same_way() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        answer = await bed.ask(completion())
        assert (answer.status, b"t0 t1 t2 t3" in answer.body) == (200, True)
        assert len(bed.backend("d").calls) == 1


async def test_decode_instances_get_no_prompts_and_collocated_ones_no_kv_transfer() -> None:
    async with TestBed(fleet(c="collocated", d="decode")) as bed:
        for _ in range(3):
            await bed.ask(STREAMED)
        assert len(bed.backend("c").calls) == 3
        assert not bed.backend("d").calls
        assert {(record.instance, record.prefill_instance) for record in bed.sink.records} == {("c", "")}


async def test_one_token_needs_no_second_engine() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.every(Script(tokens=1))
        answer = await bed.ask(completion(stream=True, max_tokens=1))
        assert answer.status == 200
        assert (len(bed.backend("p").calls), len(bed.backend("d").calls)) == (1, 0)


async def test_an_answer_that_ends_with_its_first_token_stays_where_it_is() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("p", Script(tokens=1, prefill_done=True))
        answer = await bed.ask(STREAMED)
        assert (answer.status, len(bed.backend("d").calls)) == (200, 0)
        (record,) = bed.sink.records
        assert (record.instance, record.prefill_instance) == ("p", "")


async def test_the_migrator_waits_for_no_prefill_that_was_an_answer() -> None:
    """Asked for once more it may take as long as it takes: it is not started again."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        patience(bed, prefilling_timeout_s=0.05)
        bed.backend("p", Script(tokens=1, prefill_done=True), Script(tokens=1, first_delay_s=1.0))
        answer = await bed.ask(completion(stream=False))
        assert (answer.status, len(bed.backend("p").calls)) == (200, 2)
        assert bed.gateway.scheduler.migrator.waiting() == 0


async def test_a_decode_engine_without_room_is_asked_again() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(refuse_status=503), Script())
        answer = await bed.ask(STREAMED)
        assert (answer.status, len(bed.backend("d").calls)) == (200, 2)
        assert len(bed.backend("p").calls) == 1


async def test_a_decode_engine_that_fails_before_the_first_byte_is_replaced() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        bed.backend("d", Script(cut_after=0))
        bed.backend("e", Script(cut_after=0), Script())
        answer = await bed.ask(STREAMED)
        assert answer.status == 200
        assert len(bed.backend("p").calls) == 1, "the KV is still there: no second prefill"
        assert answer.headers["x-slackline-instance"] == "e"


@pytest.mark.parametrize("asked", [STREAMED, completion()], ids=["streamed", "whole"])
async def test_what_a_decode_engine_refuses_of_the_request_itself_is_answered_not_tried_again(asked: bytes) -> None:
    """A chat that asks for more tokens than there is room, say: its prefill asks for one and cannot find out."""
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        bed.backend("d", Script(refuse_status=400))
        bed.backend("e", Script(refuse_status=400))
        answer = await bed.ask(asked)
        assert (answer.status, answer.error["code"]) == (400, "invalid_value")
        assert len(bed.backend("p").calls) == len(bed.backend("d").calls) + len(bed.backend("e").calls) == 1
        (record,) = bed.sink.records
        assert (record.outcome, record.error_code) == ("refused", "engine_rejected")
        assert await left_outstanding(bed) == 0


async def test_a_whole_answer_whose_decode_engine_fails_is_prefilled_again() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(cut_after=0), Script())
        answer = await bed.ask(completion())
        assert (answer.status, len(bed.backend("p").calls), len(bed.backend("d").calls)) == (200, 2, 2)
        assert ("place", "decode_failed") in kinds(bed)


async def test_after_the_first_token_a_failure_ends_the_stream_with_an_error() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        bed.every(Script(cut_after=2))
        bed.backend("p", Script())
        answer = await bed.ask(STREAMED)
        assert "engine_failed" in answer.events[-1]
        assert bed.sink.records[0].outcome == "cut"


async def test_kv_lost_with_its_prefill_engine_is_computed_again() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        bed.backend("d", Script(hang_after=0), Script())
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.backend("d").running == 1)
        held = next(name for name in "pq" if bed.backend(name).calls)
        bed.gateway.runtime.instance_down(held, "test")
        answer = await client.done()
        assert answer.status == 200
        assert ("place", "kv_lost") in kinds(bed)
        assert len(bed.backend("p").calls) + len(bed.backend("q").calls) == 2


async def test_a_prefill_engine_that_dies_at_work_is_replaced() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        bed.backend("p", Script(cut_after=0), Script())
        bed.backend("q", Script(cut_after=0), Script())
        answer = await bed.ask(STREAMED)
        assert answer.status == 200
        assert len(bed.backend("p").calls) + len(bed.backend("q").calls) == 3


async def test_a_request_that_loses_two_prefill_engines_is_tried_at_no_third() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", r="prefill", d="decode")) as bed:
        for name in "pqr":
            bed.backend(name).deadly = b"{"
        answer = await bed.ask(STREAMED)
        assert (answer.status, answer.error["code"]) == (422, "ends_engines")
        assert sum(len(bed.backend(name).calls) for name in "pqr") == 2


async def test_a_request_that_loses_two_decode_engines_is_tried_at_no_third() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode", f="decode")) as bed:
        for name in "def":
            bed.backend(name).deadly = b"{"
        answer = await bed.ask(STREAMED)
        assert (answer.status, answer.error["code"]) == (422, "ends_engines")
        assert sum(len(bed.backend(name).calls) for name in "def") == 2
        assert bed.gateway.scheduler.migrator.waiting() == 0


async def test_no_decode_engine_that_works_ends_with_an_error_not_with_waiting() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(refuse_status=500))
        answer = await bed.ask(STREAMED)
        assert (answer.status, "no_capacity" in answer.body.decode()) == (503, True)
        assert bed.sink.records[0].outcome == "failed"


async def test_a_client_that_hangs_up_during_the_transfer_is_cancelled_at_the_decode_engine() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(hang_after=0))
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.backend("d").running == 1)
        await client.hang_up()
        await until_on_loop(lambda: bed.backend("d").running == 0)
        assert bed.sink.records[0].outcome == "cancelled"
        await asyncio.sleep(0)
        assert not bed.gateway.runtime.requests
        assert bed.gateway.scheduler.migrator.waiting() == 0


async def test_many_at_once_are_all_answered_once() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode", e="decode")) as bed:
        clients = [bed.send(completion(stream=bool(i % 2))) for i in range(40)]
        answers = [await client.done() for client in clients]
        assert {answer.status for answer in answers} == {200}
        assert len(bed.sink.records) == 40
        assert sum(len(bed.backend(name).calls) for name in "de") == 40


async def test_roles_change_without_a_restart_and_nothing_is_lost() -> None:
    async with TestBed(fleet(p="prefill", d="decode", c="collocated")) as bed:
        clients = [bed.send(STREAMED) for _ in range(6)]
        await asyncio.sleep(0)
        bed.gateway.configure(fleet(p="decode", d="prefill", c="decode"))
        clients += [bed.send(STREAMED) for _ in range(6)]
        answers = [await client.done() for client in clients]
        assert {answer.status for answer in answers} == {200}
        before = len(bed.backend("p").calls), len(bed.backend("d").calls), len(bed.backend("c").calls)
        await bed.ask(STREAMED)
        after = len(bed.backend("p").calls), len(bed.backend("d").calls), len(bed.backend("c").calls)
        assert after[1] == before[1] + 1, "d prefills now"
        assert after[0] + after[2] == before[0] + before[2] + 1, "p or c decodes"


async def test_a_fleet_that_is_collocated_again_hands_nothing_over() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.gateway.configure(fleet(p="collocated", d="collocated"))
        await asyncio.sleep(0)
        answer = await bed.ask(STREAMED)
        assert answer.status == 200
        await until_on_loop(lambda: not bed.gateway.scheduler.disaggregated)  # p has freed what it prefilled in vain
        assert len(bed.backend("p").calls) + len(bed.backend("d").calls) == 1


async def test_a_request_between_two_stages_is_prefilled_again_where_only_collocated_engines_are_left() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("p", Script(first_delay_s=0.05))
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.backend("p").calls)
        bed.gateway.configure(fleet(p="collocated", d="collocated"))
        answer = await client.done()
        assert answer.status == 200
        assert ("place", "no_decode_instance") in kinds(bed)
        await until_on_loop(lambda: not bed.gateway.scheduler.disaggregated)  # p has freed what it prefilled in vain


async def test_a_request_between_two_stages_ends_where_no_one_is_left_to_decode() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        patience(bed, hold_s=0.1)
        bed.backend("p", Script(first_delay_s=0.05))
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.backend("p").calls)
        bed.gateway.configure(fleet(p="prefill"))
        answer = await client.done()
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")


async def test_roles_that_were_taken_away_are_forgotten() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.gateway.configure(fleet(p="collocated", d="collocated"))
        await asyncio.sleep(0)
        bed.gateway.configure(fleet(p="prefill", d="collocated", e="decode"))
        await bed.gateway.monitor.settle(1)
        await asyncio.sleep(0)
        runtime = bed.gateway.runtime
        assert [each.id for each in runtime.scheduler.migrator.fleet(runtime.clock())] == ["e"]


async def test_a_first_token_at_the_moment_of_the_time_out_counts() -> None:
    """What was pushed before the wake-up is heard before it, or a stream that began would be sent twice."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        scheduler = bed.gateway.scheduler
        bed.backend("d", Script(hang_after=0))
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.backend("d").running == 1)
        await asyncio.sleep(0)
        (name,) = bed.gateway.runtime.requests
        assert scheduler.migrator.state_of(name) is State.MOVING
        patience(bed, moving_timeout_s=1e-9)
        bed.gateway.runtime.push(ev.TransferDone(name, "d"))
        bed.gateway.runtime._woke()
        await asyncio.sleep(0.01)
        assert scheduler.migrator.state_of(name) is State.COMMITTED
        assert bed.backend("d").running == 1
        await client.hang_up()


async def test_decode_instances_are_told_as_serving() -> None:
    """The scaler of the decode stage reads them from the gateway's message."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        await bed.ask(STREAMED)
        message = status.fleet_message(bed.gateway, 1, [])
        told = {each["id"]: (each["role"], each["state"]) for each in message["instances"]}
        assert told == {"p": ("prefill", "up"), "d": ("decode", "up")}
        assert message["models"]["demo"]["migrating"] == 0
