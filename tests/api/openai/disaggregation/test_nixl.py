"""vLLM's NIXL choreography through the gateway, against contract fakes on real sockets, and what may break in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from controller.core.types import InstanceSpec, Role
from controller.dispatch.lifecycle import MAX_PREFILLS
from tests.api.openai.disaggregation.disaggregated import patience
from tests.api.openai.gateways import completion
from tests.api.openai.servers import ServerBed
from tests.waiting import until_on_loop
from tests.workers.backends.nixl_server import ASKED, NixlServer

STREAMED = completion(stream=True)


class Fleet(ServerBed):
    def __init__(self, servers: dict[str, NixlServer], session: aiohttp.ClientSession) -> None:
        roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
        super().__init__([InstanceSpec(n, "demo", url=s.url, role=roles[n]) for n, s in servers.items()], session)
        self.servers = servers


@asynccontextmanager
async def fleet(names: str, **options: object) -> AsyncIterator[Fleet]:
    """fleet("pd"): p and q prefill, d and e decode."""
    async with AsyncExitStack() as stack:
        servers = {name: await stack.enter_async_context(NixlServer(**options)) for name in names}  # type: ignore[arg-type]
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield await stack.enter_async_context(Fleet(servers, session))  # type: ignore[misc]


def links_closed(bed: Fleet) -> list[str]:
    views = bed.gateway.scheduler.migrator.links.views(bed.gateway.runtime.clock())
    return [view.target for view in views if view.closed]


async def test_prefill_first_then_decode_with_its_answer_as_it_came() -> None:
    async with fleet("pd") as bed:
        p, d = bed.servers["p"], bed.servers["d"]
        answer = await bed.ask(completion(stream=True, stream_options={"include_usage": True}, min_tokens=2))
        assert answer.status == 200
        assert sum(f"by {p.engine_id[:4]}" in event for event in answer.events) == 4, "decoded from the KV of p"
        (first,), (second,) = p.bodies, d.bodies
        assert (first["stream"], first["max_tokens"], first["kv_transfer_params"]) == (False, 1, ASKED)
        assert "stream_options" not in first
        assert (first["min_tokens"], second["min_tokens"]) == (1, 2), "no first token may end it"
        offer = second["kv_transfer_params"]
        assert offer["remote_engine_id"] == p.engine_id
        assert offer["remote_request_id"] == f"cmpl-{first['request_id']}-0"
        assert (offer["remote_block_ids"], offer["transfer_mode"]) == ([[3, 1, 2]], "pull")
        assert (p.computed, d.computed, d.pulled) == (1, 0, 1)
        assert not p.kept, "pulled blocks are freed"


async def test_whole_answers_and_chats_go_the_same_way() -> None:
    async with fleet("pd") as bed:
        assert (await bed.ask(completion())).status == 200
        asked = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3}
        assert (await bed.ask(asked, "/v1/chat/completions")).status == 200
        assert "max_completion_tokens" not in bed.servers["p"].bodies[1]
        assert (bed.servers["d"].pulled, bed.servers["d"].computed) == (2, 0)


@pytest.mark.parametrize("body", [STREAMED, completion()], ids=["streamed", "whole"])
async def test_a_prompt_that_a_decode_server_turned_away_is_computed_again_once_it_has_room(
    body: dict[str, object],
) -> None:
    """Turned away, its blocks were freed: but nobody computes it again before there is room for it."""
    async with fleet("pd") as bed:
        p, d = bed.servers["p"], bed.servers["d"]
        d.refuse = 503
        client = bed.send(body)
        await until_on_loop(lambda: len(d.bodies) > 3)
        assert (p.computed, p.freed, p.kept) == (1, 1, {})
        d.refuse = 0
        answer = await client.done()
        assert (answer.status, p.computed, d.pulled, d.computed) == (200, 2, 1, 0)
        assert links_closed(bed) == []


async def test_a_decode_server_that_dies_before_its_first_byte_is_replaced() -> None:
    async with fleet("pde") as bed:
        for name in "de":
            bed.servers[name].hold.clear()
        client = bed.send(STREAMED)
        await until_on_loop(lambda: any(bed.servers[name].running for name in "de"))
        dead, other = ("d", "e") if bed.servers["d"].running else ("e", "d")
        bed.servers[other].hold.set()
        await bed.servers[dead].die()
        answer = await client.done()
        assert (answer.status, bed.servers["p"].computed, bed.servers[other].pulled) == (200, 1, 1)


async def test_blocks_that_are_gone_are_computed_again() -> None:
    """Their lease ended before any decode server came: vLLM fails the request, and does not say why."""
    async with fleet("pd", lease_s=0.0) as bed:
        bed.servers["d"].hold.clear()
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.servers["d"].running)
        bed.servers["p"].lease_s = 30.0
        bed.servers["d"].hold.set()
        answer = await client.done()
        assert (answer.status, bed.servers["p"].computed, bed.servers["d"].pulled) == (200, 2, 1)
        assert ("place", "kv_lost") in bed.decisions()
        assert links_closed(bed) == []


async def test_blocks_that_are_gone_each_time_end_as_an_error_not_as_waiting() -> None:
    async with fleet("pd", lease_s=0.0) as bed:
        patience(bed, retry_s=0.005)
        answer = await bed.ask(STREAMED)
        assert (answer.status, "no_capacity" in answer.body.decode()) == (503, True)
        assert (bed.servers["p"].computed, bed.outstanding()) == (MAX_PREFILLS, 0)


async def test_a_prefill_server_that_dies_with_the_blocks_has_them_computed_elsewhere() -> None:
    async with fleet("pqd") as bed:
        bed.servers["d"].hold.clear()
        client = bed.send(STREAMED)
        await until_on_loop(lambda: bed.servers["d"].running)
        dead, other = ("p", "q") if bed.servers["p"].computed else ("q", "p")
        await bed.servers[dead].die()
        bed.gateway.monitor.probe(dead)
        await until_on_loop(lambda: not bed.gateway.fleet.seats[dead].up)
        bed.servers["d"].hold.set()
        answer = await client.done()
        assert (answer.status, bed.servers[other].computed) == (200, 1)
        assert ("place", "kv_lost") in bed.decisions()


async def test_a_server_that_recomputes_what_it_cannot_load_answers_all_the_same() -> None:
    async with fleet("pd", lease_s=0.0, policy="recompute") as bed:
        answer = await bed.ask(STREAMED)
        assert (answer.status, bed.servers["d"].computed) == (200, 1)


async def test_a_first_token_that_stops_needs_no_decode_server() -> None:
    async with fleet("pd") as bed:
        bed.servers["p"].finish_prefill = "stop"
        answer = await bed.ask(STREAMED)
        assert (answer.status, len(bed.servers["d"].bodies)) == (200, 0)


async def test_a_prefill_that_was_aborted_offers_no_blocks() -> None:
    """Only one that ended by length or stop does; the rest is computed where it decodes."""
    async with NixlServer() as server, aiohttp.ClientSession() as session:
        for finish, offered in (("length", True), ("stop", True), ("abort", False)):
            server.finish_prefill = finish
            body = {"prompt": "x", "request_id": finish, "max_tokens": 1, "kv_transfer_params": ASKED}
            async with session.post(f"{server.url}/v1/completions", json=body) as response:
                said = await response.json()
            assert (said["kv_transfer_params"] is not None, f"cmpl-{finish}-0" in server.kept) == (offered, offered)
