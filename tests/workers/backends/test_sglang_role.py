"""SGLang's roles are switched as its server allows, or the refusal says why."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from controller.core.types import Role
from tests.workers.backends.sglang_calls import adapter, call
from tests.workers.backends.sglang_server import SglangServer
from workers.backends.base import RoleRefused

GRAPHS = {"decode_cuda_graph_bs": [1, 2], "decode_cuda_graph_memory_gb": 0.5}


def switching(mode: str = "prefill", **options: Any) -> SglangServer:
    return SglangServer(disaggregation_mode=mode, enable_pd_role_switch=True, **options)


async def test_a_prefill_engine_becomes_a_decode_engine_with_a_peers_graphs(session: aiohttp.ClientSession) -> None:
    async with switching() as server, switching("decode") as peer:
        settings = await adapter(peer, session).role_settings()
        backend = adapter(server, session)
        switched = await backend.set_role(Role.DECODE, settings)
        assert (switched.old, switched.new, server.mode, server.graphs) == ("prefill", "decode", "decode", peer.graphs)
        assert (await backend.known()).role is Role.DECODE
        back = await backend.set_role(Role.PREFILL)
        assert (back.old, server.mode) == ("decode", "prefill")


async def test_a_role_it_has_is_no_switch(session: aiohttp.ClientSession) -> None:
    async with switching() as server:
        assert (await adapter(server, session).set_role(Role.PREFILL)).already
        assert server.asked == []


@pytest.mark.parametrize(
    ("options", "role", "reason", "field"),
    [
        ({"disaggregation_mode": "prefill"}, Role.DECODE, "not_enabled", "enable_pd_role_switch"),
        ({"disaggregation_mode": "null", "enable_pd_role_switch": True}, Role.DECODE, "no_such_switch", "role"),
        ({"disaggregation_mode": "decode", "enable_pd_role_switch": True}, Role.COLLOCATED, "no_such_switch", "role"),
        (
            {
                "disaggregation_mode": "prefill",
                "enable_pd_role_switch": True,
                "disaggregation_transfer_backend": "nixl",
            },
            Role.DECODE,
            "transfer_backend",
            "disaggregation_transfer_backend",
        ),
        (
            {"disaggregation_mode": "prefill", "enable_pd_role_switch": True},
            Role.DECODE,
            "not_prepared",
            "decode_cuda_graph_memory_gb",
        ),
    ],
)
async def test_a_switch_that_cannot_be_says_why(
    session: aiohttp.ClientSession, options: dict[str, Any], role: Role, reason: str, field: str
) -> None:
    async with SglangServer(**options) as server:
        before = server.mode
        with pytest.raises(RoleRefused) as caught:
            await adapter(server, session).set_role(role)
        assert (caught.value.reason, caught.value.field, caught.value.restorable) == (reason, field, True)
        assert server.mode == before


async def test_nothing_is_switched_while_something_runs(session: aiohttp.ClientSession) -> None:
    async with switching("prefill") as server:
        backend = adapter(server, session)
        task = asyncio.create_task(backend.prefill(call(offer=await backend.meeting())))
        while not any(job.stage == "prefill_bootstrap_queue_reqs" for job in server.jobs.values()):
            await asyncio.sleep(0.005)
        with pytest.raises(RoleRefused) as caught:
            await backend.set_role(Role.DECODE, GRAPHS)
        assert (caught.value.reason, caught.value.again) == ("not_idle", True)
        assert caught.value.field == "prefill_bootstrap_queue_reqs"
        assert "/pd_role_switch" not in server.asked
        task.cancel()


async def test_a_switch_that_broke_half_way_is_not_restorable(session: aiohttp.ClientSession) -> None:
    async with switching() as server:
        server.switch_fails = "kv manager could not be rebuilt"
        with pytest.raises(RoleRefused, match="could not be rebuilt") as caught:
            await adapter(server, session).set_role(Role.DECODE, GRAPHS)
        assert (caught.value.reason, caught.value.restorable) == ("unsafe_to_restore", False)
        assert not await adapter(server, session).ready()


@pytest.mark.parametrize(
    ("told", "message", "reason", "restorable", "again"),
    [
        ("switch_refused", "transfer threads are busy", "engine_refused", True, False),
        ("switch_refused", "scheduler is not idle", "engine_refused", True, True),
        ("switch_fails", "could not be rebuilt: scheduler is not idle", "unsafe_to_restore", False, False),
        ("prepare_fails", "graphs were half captured while not idle", "unsafe_to_restore", False, False),
    ],
)
async def test_what_the_server_says_of_its_state_goes_before_its_words(
    session: aiohttp.ClientSession, told: str, message: str, reason: str, restorable: bool, again: bool
) -> None:
    async with switching() as server:
        setattr(server, told, message)
        with pytest.raises(RoleRefused, match=message) as caught:
            await adapter(server, session).set_role(Role.DECODE, GRAPHS)
        assert (caught.value.reason, caught.value.restorable, caught.value.again) == (reason, restorable, again)
        assert await adapter(server, session).ready() is restorable


@pytest.mark.parametrize("dies_at", ["prepare", "switch"])
async def test_a_server_lost_while_it_is_told_is_not_restorable(session: aiohttp.ClientSession, dies_at: str) -> None:
    async with switching() as server:
        server.dies_at = dies_at
        with pytest.raises(RoleRefused) as caught:
            await adapter(server, session).set_role(Role.DECODE, GRAPHS)
        assert (caught.value.reason, caught.value.restorable, caught.value.again) == ("connection_lost", False, False)
