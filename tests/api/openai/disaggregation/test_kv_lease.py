"""Real engines whose lease of KV ends while the decode engine is full: what was lost is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest

from controller.core.types import InstanceSpec, Role
from tests.api.openai.gateways import completion
from tests.api.openai.servers import ServerBed
from tests.workers.engine.process import EngineProcess

LEASE_S = 1.0
OPTIONS = (
    *("--profile", "constant:15ms", "--model", "demo", "--max-model-len", "300", "--kv-layers", "8"),
    *("--kv-token-bytes", "512", "--shutdown-timeout", "0", "--no-enable-prefix-caching", "--kv-lease", str(LEASE_S)),
)
TOKENS = 180  # of an answer: 2.7 s, longer than the lease
ROOM_FOR_ONE = "19"  # blocks of 16 tokens


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    return {
        "p": (*OPTIONS, "--kv-blocks", "256", "--role", "prefill"),
        "d": (*OPTIONS, "--kv-blocks", ROOM_FOR_ONE, "--role", "decode"),
    }


async def test_kv_whose_lease_ended_while_it_waited_is_computed_again(
    engines: dict[str, EngineProcess], fleet_token: str
) -> None:
    specs = [
        InstanceSpec("p", "demo", url=engines["p"].url, backend="reference", role=Role.PREFILL),
        InstanceSpec("d", "demo", url=engines["d"].url, backend="reference", role=Role.DECODE),
    ]
    async with aiohttp.ClientSession(auto_decompress=False) as session, ServerBed(specs, session) as bed:
        asked = completion(max_tokens=TOKENS, stream=True, ignore_eos=True)
        clients = [bed.send({**asked, "prompt": [1] * 100})]
        await asyncio.wait_for(clients[0].answer.changed.wait(), 30)  # it has the room of the decode engine
        clients.append(bed.send({**asked, "prompt": [2] * 100}))
        answers = [await asyncio.wait_for(client.done(), 30) for client in clients]
        assert [answer.status for answer in answers] == [200, 200]
        steps = [[(step["kind"], step["reason"]) for step in record.decisions] for record in bed.sink.records]
        assert {("transfer", "kv_lost"), ("place", "kv_lost")} <= set(steps[1])
        migrator = bed.gateway.scheduler.migrator
        assert not any(view.closed for view in migrator.links.views(bed.gateway.runtime.clock()))
        assert bed.outstanding() == 0
