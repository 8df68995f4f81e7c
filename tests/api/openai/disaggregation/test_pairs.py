"""Both stages at once through the gateway, against contract fakes of SGLang on real sockets, and their faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from api.openai import status
from controller.core.types import InstanceSpec, Role
from tests.api.openai.gateways import completion
from tests.api.openai.servers import ServerBed
from tests.waiting import until_on_loop
from tests.workers.backends.sglang_server import SglangServer

STREAMED = completion(stream=True)
ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "null": Role.COLLOCATED}


class Fleet(ServerBed):
    """SGLang servers by instance id, and instances of other kinds."""

    def __init__(self, servers: dict[str, SglangServer], session: aiohttp.ClientSession, *more: InstanceSpec) -> None:
        specs = [
            InstanceSpec(name, "demo", url=server.url, backend="sglang", role=ROLES[server.mode])
            for name, server in servers.items()
        ]
        super().__init__([*specs, *more], session)
        self.servers = servers


@asynccontextmanager
async def fleet(decode_slots: int | None = None, **modes: str) -> AsyncIterator[Fleet]:
    """fleet(p="prefill", d="decode")"""
    few = {} if decode_slots is None else {"max_running_requests": decode_slots}
    slots = {"prefill": {}, "decode": few, "null": {}}
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(SglangServer(disaggregation_mode=mode, **slots[mode]))
            for name, mode in modes.items()
        }
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield await stack.enter_async_context(Fleet(servers, session))


def rooms(server: SglangServer) -> list[int]:
    return [body["bootstrap_room"] for body in server.bodies]


async def idle(*servers: SglangServer) -> None:
    async with asyncio.timeout(30):
        while any(server.jobs for server in servers):
            await asyncio.sleep(0.005)


async def test_both_legs_carry_the_same_body_and_the_same_room() -> None:
    async with fleet(p="prefill", d="decode") as bed:
        answer = await bed.ask(STREAMED)
        assert answer.status == 200
        assert sum("of 3" in event for event in answer.events) == 4
        assert answer.headers["x-slackline-instance"] == "d"
        (first,), (second,) = bed.servers["p"].bodies, bed.servers["d"].bodies
        assert {name: first[name] for name in ROOM} == {name: second[name] for name in ROOM}
        assert (first["bootstrap_host"], first["bootstrap_port"]) == (
            "127.0.0.1",
            bed.servers["p"].args["disaggregation_bootstrap_port"],
        )
        assert 0 <= first["bootstrap_room"] < 2**63
        own = ("rid", "priority")
        assert {k: v for k, v in first.items() if k not in own} == {k: v for k, v in second.items() if k not in own}
        (record,) = bed.sink.records
        assert (record.outcome, record.instance, record.output_tokens) == ("ok", "d", 4)
        assert {"dispatch", "place", "prefill", "transfer"} <= {kind for kind, _ in bed.decisions()}


async def test_whole_answers_and_chats_go_the_same_way() -> None:
    async with fleet(p="prefill", d="decode") as bed:
        whole = await bed.ask(completion())
        assert (whole.status, b"of 3 of 3" in whole.body) == (200, True)
        asked = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 2}
        chat = await bed.ask(asked, "/v1/chat/completions")
        assert (chat.status, chat.events[-1]) == (200, "[DONE]")
        assert len(set(rooms(bed.servers["p"]))) == 2


async def test_one_token_goes_in_a_pair_too() -> None:
    """A prefill server refuses what has no room."""
    async with fleet(p="prefill", d="decode") as bed:
        answer = await bed.ask(completion(max_tokens=1, stream=True))
        assert (answer.status, len(bed.servers["d"].bodies)) == (200, 1)


async def test_unified_servers_are_sent_no_room() -> None:
    async with fleet(c="null") as bed:
        assert (await bed.ask(STREAMED)).status == 200
        assert "bootstrap_room" not in bed.servers["c"].bodies[0]


async def test_a_decode_engine_that_refuses_is_replaced_and_the_room_left() -> None:
    async with fleet(p="prefill", d="decode", e="decode") as bed:
        bed.servers["d"].refuse = 500
        for _ in range(2):
            answer = await bed.ask(STREAMED)
            assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "e")
        sent = rooms(bed.servers["p"])
        assert len(sent) == len(set(sent)) > 2, "each try has a room of its own"
        await idle(bed.servers["p"])
        assert bed.servers["p"].aborted, "the prefill that nobody would take was aborted by id"
        assert not bed.servers["p"].rooms


async def test_a_decode_engine_that_dies_while_the_prompt_is_computed_is_replaced() -> None:
    async with fleet(p="prefill", d="decode", e="decode") as bed:
        bed.servers["p"].hold.clear()
        client = bed.send(STREAMED)
        await until_on_loop(lambda: any(bed.servers[name].jobs for name in "de") and bed.servers["p"].jobs)
        dead, other = ("d", "e") if bed.servers["d"].jobs else ("e", "d")
        await bed.servers[dead].die()
        bed.servers["p"].hold.set()
        answer = await client.done()
        assert (answer.status, answer.headers["x-slackline-instance"]) == (200, other)
        await idle(bed.servers["p"])


async def test_a_decode_engine_that_dies_with_the_kv_has_it_computed_again() -> None:
    async with fleet(p="prefill", d="decode", e="decode") as bed:
        for name in "de":
            bed.servers[name].hold.clear()
        client = bed.send(STREAMED)
        await until_on_loop(
            lambda: any(job.stage == "running" for name in "de" for job in bed.servers[name].jobs.values())
        )
        await idle(bed.servers["p"])
        (in_flight,) = bed.gateway.runtime.requests.values()
        await until_on_loop(lambda: in_flight.prefill is None or in_flight.prefill.done())
        dead, other = ("d", "e") if bed.servers["d"].jobs else ("e", "d")
        for name in "de":
            bed.servers[name].hold.set() if name == other else None
        await bed.servers[dead].die()
        answer = await client.done()
        assert answer.status == 200
        assert len(bed.servers["p"].bodies) >= 2
        assert ("place", "decode_failed") in bed.decisions()


async def test_a_prefill_engine_that_dies_leaves_no_decode_waiting() -> None:
    async with fleet(p="prefill", q="prefill", d="decode") as bed:
        for name in "pq":
            bed.servers[name].hold.clear()
        client = bed.send(STREAMED)
        await until_on_loop(lambda: any(bed.servers[name].jobs for name in "pq") and bed.servers["d"].jobs)
        dead, other = ("p", "q") if bed.servers["p"].jobs else ("q", "p")
        bed.servers[other].hold.set()
        await bed.servers[dead].die()
        answer = await client.done()
        assert answer.status == 200
        assert len(bed.servers[other].bodies) == 1
        await idle(bed.servers["d"], bed.servers[other])
        assert bed.sink.records[0].outcome == "ok"


async def test_a_prefill_engine_that_fails_alone_is_tried_elsewhere() -> None:
    async with fleet(p="prefill", q="prefill", d="decode") as bed:
        bed.servers["p"].refuse = bed.servers["q"].refuse = 500
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.servers["p"].bodies or bed.servers["q"].bodies)
        bed.servers["p"].refuse = bed.servers["q"].refuse = 0
        answer = await client.done()
        assert answer.status == 200
        await idle(*bed.servers.values())


async def test_no_decode_engine_that_works_ends_with_an_error_and_leaves_nothing() -> None:
    async with fleet(p="prefill", d="decode") as bed:
        bed.servers["d"].refuse = 500
        answer = await bed.ask(STREAMED)
        assert (answer.status, "no_capacity" in answer.body.decode()) == (503, True)
        await idle(bed.servers["p"])
        runtime = bed.gateway.runtime
        assert not runtime.requests
        assert runtime.scheduler.migrator.waiting() == 0
        assert bed.outstanding() == 0


async def test_what_the_client_did_wrong_is_its_own_answer() -> None:
    async with fleet(p="prefill", d="decode") as bed:
        bed.servers["p"].refuse = bed.servers["d"].refuse = 400
        answer = await bed.ask(STREAMED)
        assert (answer.status, answer.error["message"]) == (400, "scripted")
        await idle(*bed.servers.values())


async def test_a_client_that_hangs_up_is_aborted_at_both() -> None:
    async with fleet(p="prefill", d="decode") as bed:
        bed.servers["p"].hold.clear()
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.servers["p"].jobs and bed.servers["d"].jobs)
        await client.hang_up()
        await idle(*bed.servers.values())
        assert bed.servers["p"].aborted
        assert bed.servers["d"].aborted
        assert bed.sink.records[0].outcome == "cancelled"


async def test_after_the_first_token_a_failure_ends_the_stream_with_an_error() -> None:
    async with fleet(p="prefill", d="decode") as bed:
        bed.servers["d"].pace_s = 0.05
        client = bed.send(completion(stream=True, max_tokens=100))
        await until_on_loop(lambda: client.answer.body)
        await bed.servers["d"].die()
        answer = await client.done()
        assert "engine_failed" in answer.events[-1]
        assert bed.sink.records[0].outcome == "cut"


async def test_many_at_once_are_all_answered_once_and_leave_nothing() -> None:
    async with fleet(p="prefill", q="prefill", d="decode", e="decode") as bed:
        clients = [bed.send(completion(stream=bool(i % 2))) for i in range(20)]
        await asyncio.wait([client.task for client in clients], timeout=30)
        answers = [await client.done() for client in clients]
        assert {answer.status for answer in answers} == {200}
        assert len(bed.sink.records) == 20
        await idle(*bed.servers.values())
        assert bed.outstanding() == 0


async def test_other_kinds_of_decode_engines_are_not_asked() -> None:
    """A vLLM would compute the prompt once more, and the SGLang prefill would wait forever."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(SglangServer(disaggregation_mode="prefill"))
        decode = await stack.enter_async_context(SglangServer(disaggregation_mode="decode"))
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        other = InstanceSpec("a", "demo", backend="fake", role=Role.DECODE)
        bed = await stack.enter_async_context(Fleet({"p": prefill, "z": decode}, session, other))
        for _ in range(3):
            answer = await bed.ask(STREAMED)
            assert answer.headers["x-slackline-instance"] == "z"
        assert not bed.backend("a").calls


async def test_a_paused_server_is_sent_nothing() -> None:
    """It would hold what it gets until it goes on."""
    async with fleet(c="null", s="null") as bed:
        bed.servers["s"].paused = True
        bed.gateway.monitor.probe("s")
        await until_on_loop(lambda: not bed.gateway.scheduler.dispatcher._fleet.instances["s"].takes, 30)
        for _ in range(4):
            assert (await bed.ask(STREAMED)).headers["x-slackline-instance"] == "c"
        bed.servers["s"].paused = False
        bed.gateway.monitor.probe("s")
        await until_on_loop(lambda: bed.gateway.scheduler.dispatcher._fleet.instances["s"].takes, 30)
        clients = [bed.send(STREAMED) for _ in range(6)]
        assert "s" in {(await client.done()).headers["x-slackline-instance"] for client in clients}


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_breaks_every_request_is_answered_and_nothing_is_left(seed: int) -> None:
    """One prefill and one decode engine die at random moments, others refuse for a while."""
    rng = random.Random(seed)
    async with fleet(p="prefill", q="prefill", d="decode", e="decode") as bed:
        for server in bed.servers.values():
            server.pace_s = 0.002
        clients = []
        breaks = [rng.choice("pq"), rng.choice("de")]
        for index in range(24):
            clients.append(bed.send(completion(stream=rng.random() < 0.7, max_tokens=rng.randint(1, 6))))
            if index in (6, 14):
                await bed.servers[breaks.pop()].die()
            flaky = bed.servers[rng.choice("pqde")]
            flaky.refuse = rng.choice((0, 0, 500, 503))
            await asyncio.sleep(rng.random() * 0.02)
        for server in bed.servers.values():
            server.refuse = 0
        await asyncio.wait([client.task for client in clients], timeout=60)
        answers = [await client.done() for client in clients]
        assert len(bed.sink.records) == 24
        assert {answer.status for answer in answers} <= {200, 502, 503}
        assert sum(answer.status == 200 for answer in answers) >= 12
        await idle(*(server for server in bed.servers.values() if server.alive))
        assert not bed.gateway.runtime.requests
        assert bed.outstanding() == 0
        assert bed.gateway.scheduler.migrator.waiting() == 0


async def test_a_pair_that_waits_for_a_decode_instance_is_pressure_on_that_stage() -> None:
    """Its prefill waits with it, so the prefill instance is idle: more of those would not help."""
    async with fleet(p="prefill", d="decode", decode_slots=1) as bed:
        bed.servers["d"].hold.clear()
        first = bed.send(STREAMED)
        await until_on_loop(lambda: bed.servers["d"].jobs)
        await idle(bed.servers["p"])
        second = bed.send(STREAMED)
        await until_on_loop(lambda: len(bed.gateway.runtime.requests) == 2)
        await asyncio.sleep(0.3)
        traffic = status.traffic_of(bed.gateway, bed.gateway.runtime.clock())["demo"]
        assert (len(bed.servers["p"].bodies), traffic["queued"], traffic["migrating"]) == (1, 0, 1)
        assert 0.25 / 5.0 < traffic["migrate_wait_over_slo"] < 1.0
        bed.servers["d"].hold.set()
        assert [(await each.done()).status for each in (first, second)] == [200, 200]
