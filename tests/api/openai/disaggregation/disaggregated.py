"""What tests of handovers through the gateway share: roles, prefills held open, what was noted of transfers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from controller.core.snapshot import GatewaySnapshot
from controller.core.types import InstanceSpec, Role
from controller.dispatch.disaggregation.rollback import KvReleases
from tests.api.openai.gateways import Client, TestBed, completion, settled, snapshot
from tests.waiting import until_on_loop
from workers.backends.base import AnswerChunk, EngineError, PrefillAnswer, UpstreamCall
from workers.backends.fake import FakeBackend, Script

STREAMED = completion(stream=True)
OTHER = b'{"error":{"message":"another layout","param":"kv_transfer_params","kv":{"reason":"other_model"}}}'


def fleet(**roles: str) -> GatewaySnapshot:
    """fleet(p="prefill", d="decode")"""
    specs = tuple(InstanceSpec(name, "demo", backend="fake", role=Role(role)) for name, role in roles.items())
    return replace(snapshot(()), instances=specs)


def tells(bed: TestBed, name: str) -> FakeBackend:
    """An engine that says when the KV has landed."""
    backend = bed.backend(name)
    backend.capabilities = replace(backend.capabilities, tells_landing=True)
    return backend


def patience(bed: TestBed, **changes: Any) -> None:
    """Other settings of its migrator: `patience(bed, moving_timeout_s=0.05)`."""
    migrator = bed.gateway.scheduler.migrator
    config = replace(migrator.config, **changes)
    migrator.config = migrator.rollback.config = migrator.placing.config = migrator._queue.config = config
    migrator.rollback.kv_releases = KvReleases(config.release_timeout_s, config.release_tries)


# ---- what was noted -------------------------------------------------------------------------------------------------


def kinds(bed: TestBed) -> list[tuple[str, str]]:
    """Of the only request, kind and reason of each decision."""
    (record,) = bed.sink.records
    return [(step["kind"], step["reason"]) for step in record.decisions]


def transfers(bed: TestBed) -> list[dict[str, Any]]:
    """Of the newest request."""
    steps = bed.sink.records[-1].decisions
    return [{"reason": step["reason"], **step["figures"]} for step in steps if step["kind"] == "transfer"]


def transfers_so_far(bed: TestBed) -> list[str]:
    """Of the only request under way, the reasons."""
    (in_flight,) = bed.gateway.runtime.requests.values()
    return [step["reason"] for step in in_flight.decisions or () if step["kind"] == "transfer"]


async def freed(bed: TestBed, name: str) -> list[str]:
    """Requests whose KV this engine was told to free, once what ended last has been told."""
    await settled()
    await until_on_loop(lambda: bed.gateway.runtime.transfers._soon is None)
    await settled()
    return bed.backend(name).freed


def outstanding(bed: TestBed) -> int:
    """Requests that instances are thought to hold."""
    runtime = bed.gateway.runtime
    now = runtime.clock()
    states = [*runtime.scheduler.dispatcher.fleet(now), *runtime.scheduler.migrator.fleet(now)]
    return sum(state.waiting + state.running for state in states)


async def left_outstanding(bed: TestBed) -> int:
    """`outstanding` once what ended last has been told."""
    await settled()
    return outstanding(bed)


def reads(bed: TestBed, name: str, *sources: str) -> None:
    """This decode engine has the model of these prefill engines only."""
    backend: FakeBackend = bed.backend(name)
    generate = backend.generate
    offers = {b'{"from":"%s"}' % source.encode() for source in sources}

    async def picky(call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        if call.offer not in offers:
            backend.calls.append(call)
            raise EngineError("another layout", status=502, body=OTHER)
        async for chunk in generate(call):
            yield chunk

    backend.generate = picky  # type: ignore[method-assign]


# ---- a decode stage beside its prefill ------------------------------------------------------------------------------


class Gate:
    """A prefill that makes its offer and then waits to be told how it ends."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.calls = 0
        self.aborted = 0
        self.end: asyncio.Future[PrefillAnswer] = asyncio.get_running_loop().create_future()
        backend.prefill = self.prefill

    async def prefill(self, call: UpstreamCall, ending: Callable[[bytes], None] | None = None) -> PrefillAnswer:
        self.calls += 1
        assert ending is not None
        ending(b'{"early":"%s"}' % self.backend.spec.id.encode())
        try:
            return await asyncio.shield(self.end)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    def ends(self, done: bool = False) -> None:
        self.end.set_result(PrefillAnswer(b'{"whole":"%s"}' % self.backend.spec.id.encode(), done))

    def fails(self) -> None:
        self.end.set_exception(EngineError("cut", unreachable=True))


async def both_at_work(bed: TestBed, *decode: Script) -> tuple[Client, *tuple[Gate, ...]]:
    """A streamed request whose prefill is held open while engine `d`, which follows `decode`, works on it already: its
    client, the gate of the engine that prefills it, and the gates of the other prefill engines."""
    gates = [Gate(bed.backend(spec.id)) for spec in bed.config.instances if spec.role is Role.PREFILL]
    bed.backend("d", *decode)
    client = bed.send(STREAMED)
    await until_on_loop(lambda: bed.backend("d").running == 1)
    return client, *sorted(gates, key=lambda gate: -gate.calls)
