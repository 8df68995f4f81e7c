"""KV cut half-way and links broken, under load, between real engines: every request ends, and the rows say what was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from django.db import connection, connections

from api.openai.gateway import Gateway, GatewayOptions
from controller.core.snapshot import ClassConfig, GatewaySnapshot
from controller.core.types import InstanceSpec, Role
from controller.models import Decision, InstanceLink
from controller.selectors.fleet.links import kv_transfers
from controller.services.records.requests import records_write
from tests import factories
from tests.api.openai.gateways import Answer, TestBed, completion, snapshot
from tests.waiting import until_on_loop
from tests.workers.engine.process import EngineProcess
from tests.workers.engine.proxy import ELSEWHERE, Wire
from workers.actions.instance_links import update_links

pytestmark = [pytest.mark.db, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

TOKEN = "fleet-secret"
LAYERS, TOKEN_BYTES, PROMPT = 8, 4096, 100
WHOLE = LAYERS * TOKEN_BYTES * PROMPT  # bytes of one prompt's KV
OPTIONS = (
    *("--profile", "constant:4ms", "--model", "demo", "--max-model-len", "512", "--kv-blocks", "256"),
    *("--kv-layers", str(LAYERS), "--kv-token-bytes", str(TOKEN_BYTES), "--shutdown-timeout", "0"),
    *("--no-enable-prefix-caching",),
)
ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}
LONGEST_S = 30.0  # of any request, whatever breaks


@pytest.fixture(scope="module", autouse=True)
def trusted() -> Iterator[None]:
    """The gateway of these tests runs in this process and tells engines to free KV."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEET_TOKEN", TOKEN)
        yield


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    """Others pull from p over a wire that the test may cut."""
    elsewhere = {"p": ("--advertise-host", ELSEWHERE)}
    return {name: (*OPTIONS, "--role", role, *elsewhere.get(name, ())) for name, role in ROLES.items()}


class Fleet(TestBed):
    """A gateway before real engines, whose records go to the database."""

    def __init__(self, config: GatewaySnapshot, session: aiohttp.ClientSession) -> None:
        super().__init__(config)
        self.gateway = Gateway(GatewayOptions("test"), session, self.sink)
        self.gateway.monitor.period_s = 0.25
        self.answers: list[Answer] = []
        self._serial = 0

    async def one(self) -> Answer:
        self._serial += 1
        prompt = [self._serial] * PROMPT
        client = self.send(completion(prompt=prompt, max_tokens=20, stream=True, ignore_eos=True))
        await asyncio.wait_for(client.task, LONGEST_S)
        self.answers.append(client.answer)
        return client.answer

    @asynccontextmanager
    async def load(self, rate: float) -> AsyncIterator[None]:
        """So many a second meanwhile; all are answered before it ends."""
        stop, tasks = asyncio.Event(), list[asyncio.Task[Answer]]()

        async def feed() -> None:
            while not stop.is_set():
                tasks.append(asyncio.create_task(self.one()))
                await asyncio.sleep(1 / rate)

        feeding = asyncio.create_task(feed())
        try:
            yield
        finally:
            stop.set()
            await feeding
            await asyncio.gather(*tasks)

    async def answered(self, more: int) -> None:
        """Return after so many more answers."""
        enough = len(self.answers) + more
        await until_on_loop(lambda: len(self.answers) >= enough, LONGEST_S, every_s=0.02)

    async def store(self) -> None:
        records, self.sink.records = self.sink.records, []
        await in_database(lambda: records_write(connection=connected(), records=records))

    def ends(self) -> set[tuple[int, bool]]:
        """Status, and whether the stream came to its end."""
        return {(answer.status, answer.body.rstrip().endswith(b"[DONE]")) for answer in self.answers}


def connected() -> Any:
    connection.ensure_connection()
    return connection.connection


async def in_database(work: Any) -> Any:
    def run() -> Any:
        try:
            return work()
        finally:
            connections.close_all()

    return await asyncio.to_thread(run)


@pytest.fixture
def fleet(engines: dict[str, EngineProcess]) -> GatewaySnapshot:
    model = factories.served_model(name="demo")
    for name, role in ROLES.items():
        factories.instance(model, id=name, role=role, url=engines[name].url)
    specs = [InstanceSpec(name, "demo", engines[name].url, "reference", Role(role)) for name, role in ROLES.items()]
    patient = ClassConfig("chat", None, 20.0, 1.0, None, 20.0, 0.95, 1.0, may_defer=True)
    return replace(snapshot(()), instances=tuple(specs), classes=(patient,), telemetry_period_s=0.25)


@asynccontextmanager
async def running(config: GatewaySnapshot) -> AsyncIterator[Fleet]:
    """Gateway and looks at the links, as a worker would do them."""

    async def looks() -> None:
        while True:
            await in_database(lambda: update_links(TOKEN))
            await asyncio.sleep(0.5)

    async with aiohttp.ClientSession(auto_decompress=False) as session:
        looking = asyncio.create_task(looks())
        await until(lambda: states_from("p") == {"up"}, "links before the first request")
        async with Fleet(config, session) as made:
            telemetry = asyncio.create_task(made.gateway.monitor.run())
            yield made
            for task in (telemetry, looking):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


def states_from(source: str, *targets: str) -> set[str]:
    rows = InstanceLink.objects.filter(source=source, target__in=targets or ("d", "e"), closed_at__isnull=True)
    return set(rows.values_list("state", flat=True))


def told(kind: str) -> set[str]:
    """Links that a decision of this kind was about."""
    return set(Decision.objects.filter(kind=kind).values_list("subject", flat=True))


async def until(condition: Any, what: str, within_s: float = 40.0) -> float:
    """Seconds waited for something in the database."""
    began = time.monotonic()
    await until_on_loop(lambda: in_database(condition), within_s, every_s=0.1, what=what)
    return time.monotonic() - began


async def wire_of(engines: dict[str, EngineProcess]) -> Wire:
    async with aiohttp.ClientSession() as session, session.get(f"{engines['p'].url}/links") as answer:
        return Wire((await answer.json())["at"]["port"])


async def test_kv_cut_half_way_is_moved_again(engines, fleet, say):
    async with await wire_of(engines) as wire, running(fleet) as bed:
        async with bed.load(rate=8):
            await bed.answered(8)
            wire.cut(after=WHOLE // 2)
            await until_on_loop(lambda: wire.cuts, what="nothing went over the wire")
            await bed.answered(8)
        assert bed.ends() == {(200, True)}
        await bed.store()
        failed = await in_database(lambda: list(kv_transfers(outcome="failed")))
        (cut,) = failed
        assert (cut.reason, cut.source, cut.state, cut.measured_by) == ("cut", "p", "moving", "engine")
        assert 0 < cut.bytes < WHOLE  # a pull that waits for its prefill may have begun before the wire was told
        assert "closed" in cut.error
        tried = await in_database(lambda: list(kv_transfers(request=cut.request).order_by("started_at", "attempt")))
        assert [row.outcome for row in tried] == ["failed", "done"]
        assert (tried[-1].bytes, tried[-1].state) == (WHOLE, "released")
        say(requests=len(bed.answers), cut_after_bytes=cut.bytes, moved_again_s=round(tried[-1].seconds, 4))


async def test_a_link_that_breaks_under_load_hangs_no_request_and_comes_back(engines, fleet, say):
    async with await wire_of(engines) as wire, running(fleet) as bed:
        async with bed.load(rate=8):
            await bed.answered(8)
            await wire.sever()
            down_s = await until(lambda: states_from("p") == {"down"}, "both links from p down")
            await until(lambda: told("link_down") == {"p to d", "p to e", "p to q"}, "a decision for each")
            await bed.answered(8)
            await wire.mend()
            await until(lambda: not states_from("p") & {"down"}, "answering again")
            await bed.answered(8)
        up_s = await until(lambda: states_from("p") == {"up"}, "forgiven")
        assert bed.ends() == {(200, True)}, "prefilled again elsewhere, or moved elsewhere"
        await bed.store()
        row = await in_database(lambda: InstanceLink.objects.get(source="p", target="d", closed_at=None))
        assert (row.state, row.last_error != "") == ("up", True)
        assert {"p to d", "p to e"} <= await in_database(lambda: told("link_up"))
        done = await in_database(lambda: kv_transfers(outcome="done", source="q").count())
        assert done > 0
        say(requests=len(bed.answers), down_s=round(down_s, 2), up_again_s=round(up_s, 2), over_q=done)
