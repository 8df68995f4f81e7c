"""Decode stages that begin while their prompt is computed, through the gateway; time-outs and ends that nobody saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import aiohttp
import pytest

from controller.core import events as ev
from controller.core.links import KvMoved
from controller.core.types import InstanceSpec, Role
from controller.dispatch.transfers import State
from tests.api.openai.gateways import TestBed, completion, until
from tests.api.openai.servers import ServerBed
from tests.api.openai.test_handoff import STREAMED, fleet, kinds
from tests.api.openai.test_transfers import freed, transfers
from tests.workers.engine.process import EngineProcess
from workers.backends.base import Chunk, EngineError, Prefilled, UpstreamCall
from workers.backends.fake import FakeBackend, Script

EARLY = Script(tokens=1, early=True, first_delay_s=0.05)
MOVED = KvMoved(bytes=4096, layers=2, tokens=3, seconds=0.25, reserved=True, early_bytes=2048)


class Gate:
    """A prefill that makes its offer and then waits to be told how it ends."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.calls = 0
        self.aborted = 0
        self.end: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
        backend.prefill = self.prefill

    async def prefill(self, call: UpstreamCall, ending: Callable[[bytes], None] | None = None) -> Prefilled:
        self.calls += 1
        assert ending is not None
        ending(b'{"early":"%s"}' % self.backend.spec.id.encode())
        try:
            return await asyncio.shield(self.end)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    def ends(self, done: bool = False) -> None:
        self.end.set_result(Prefilled(b'{"whole":"%s"}' % self.backend.spec.id.encode(), done))

    def fails(self) -> None:
        self.end.set_exception(EngineError("cut", unreachable=True))


def outstanding(bed: TestBed) -> int:
    runtime = bed.gateway.runtime
    now = runtime.clock()
    states = [*runtime.dispatcher.fleet(now), *runtime.handoff.migrator.fleet(now)]
    return sum(state.waiting + state.running for state in states)


async def test_the_decode_engine_is_asked_while_the_prefill_runs() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        gate = Gate(bed.backend("p"))
        bed.backend("d", Script(first_delay_s=0.05))
        client = bed.send(STREAMED)
        await until(lambda: bed.backend("d").running == 1)
        assert not gate.end.done()
        (call,) = bed.backend("d").calls
        assert call.offer == b'{"early":"p"}'
        gate.ends()
        answer = await client.done()
        assert answer.status == 200
        assert [kind for kind, _ in kinds(bed)] == ["slo", "dispatch", "place", "prefill", "transfer"]
        (record,) = bed.sink.records
        assert (record.outcome, record.instance, record.prefill_instance) == ("ok", "d", "p")
        await asyncio.sleep(0.01)
        assert outstanding(bed) == 0


async def test_of_what_moved_early_the_record_says_how_much() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("p", EARLY)
        bed.backend("d", Script(first_delay_s=0.1, moved=MOVED))
        await bed.ask(STREAMED)
        (one,) = transfers(bed)
        assert (one["bytes"], one["early_bytes"], one["state"]) == (4096, 2048, "released")


async def test_without_overlap_it_is_placed_when_the_prefill_has_ended() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        migrator = bed.gateway.runtime.handoff.migrator
        migrator.config = replace(migrator.config, overlap=False)
        gate = Gate(bed.backend("p"))
        client = bed.send(STREAMED)
        await asyncio.sleep(0.05)
        assert not bed.backend("d").calls
        gate.ends()
        assert (await client.done()).status == 200
        assert bed.backend("d").calls[0].offer == b'{"whole":"p"}'


async def test_a_whole_answer_overlaps_too() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("p", EARLY)
        bed.backend("d", Script(first_delay_s=0.1))
        answer = await bed.ask(completion())
        assert (answer.status, b"t0 t1 t2 t3" in answer.body) == (200, True)
        await asyncio.sleep(0.01)
        assert outstanding(bed) == 0


async def test_a_decode_engine_lost_when_all_has_landed_and_its_prefill_has_not_ended_is_left_once() -> None:
    """Told to the dispatcher twice, the request stood in its queue twice."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        gate = Gate(bed.backend("p"))
        decode = bed.backend("d", Script(cut_after=0, moved=MOVED), Script())
        decode.capabilities = replace(decode.capabilities, tells_landing=True)
        client = bed.send(completion())
        await until(lambda: gate.calls == 2)
        (flight,) = bed.gateway.runtime.flights.values()
        assert flight.request.attempts == 1
        assert not bed.gateway.runtime.dispatcher.waiting(flight.request.id)
        gate.ends()
        assert (await client.done()).status == 200
        await asyncio.sleep(0.05)
        assert (gate.calls, outstanding(bed)) == (2, 0)


async def test_a_prefill_that_fails_takes_its_decode_stage_with_it_and_both_begin_anew() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        gates = {name: Gate(bed.backend(name)) for name in "pq"}
        bed.backend("d", Script(hang_after=0), Script())
        client = bed.send(STREAMED)
        await until(lambda: bed.backend("d").running == 1)
        first = next(name for name, gate in gates.items() if gate.calls)
        other = "q" if first == "p" else "p"
        gates[first].fails()
        await until(lambda: gates[other].calls == 1)
        gates[other].ends()
        answer = await client.done()
        assert answer.status == 200
        assert len(bed.backend("d").aborted) == 1
        failed, done = transfers(bed)
        assert (failed["outcome"], failed["undo"], done["outcome"]) == ("undone", "prefill_failed", "done")
        await asyncio.sleep(0.01)
        assert outstanding(bed) == 0


async def test_a_decode_engine_that_fails_meanwhile_is_replaced_and_the_prefill_goes_on() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        gate = Gate(bed.backend("p"))
        bed.backend("d", Script(cut_after=0), Script(first_delay_s=0.05))
        bed.backend("e", Script(cut_after=0), Script(first_delay_s=0.05))
        client = bed.send(completion(stream=False))
        await until(lambda: len(bed.backend("d").calls) + len(bed.backend("e").calls) >= 1)
        await asyncio.sleep(0.2)
        gate.ends()
        assert (await client.done()).status == 200
        client = bed.send(STREAMED)
        assert (await client.done()).status == 200
        assert gate.aborted == 0 or gate.calls > 1


async def test_of_a_stream_only_the_decode_stage_is_placed_again() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        gate = Gate(bed.backend("p"))
        for name in "de":
            bed.backend(name, Script(cut_after=0), Script(hang_after=0))
        client = bed.send(STREAMED)
        await until(
            lambda: bed.backend("d").running + bed.backend("e").running == 1 and len(transfers_so_far(bed)) >= 1
        )
        assert (gate.calls, gate.aborted) == (1, 0)
        await client.hang_up()
        assert gate.aborted == 1


def transfers_so_far(bed: TestBed) -> list[str]:
    (flight,) = bed.gateway.runtime.flights.values()
    return [step["reason"] for step in flight.decisions or () if step["kind"] == "transfer"]


async def test_a_first_token_that_is_the_last_needs_no_decode_stage() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        gate = Gate(bed.backend("p"))
        bed.backend("d", Script(hang_after=0))
        client = bed.send(STREAMED)
        await until(lambda: bed.backend("d").running == 1)
        gate.ends(done=True)
        answer = await client.done()
        assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "p")
        await until(lambda: bed.backend("d").running == 0)
        (record,) = bed.sink.records
        assert (record.instance, record.prefill_instance) == ("p", "")
        await asyncio.sleep(0.01)
        assert outstanding(bed) == 0


async def test_a_client_that_hangs_up_aborts_both_stages_and_frees_the_kv() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        gate = Gate(bed.backend("p"))
        bed.backend("d", Script(hang_after=0))
        client = bed.send(STREAMED)
        await until(lambda: bed.backend("d").running == 1)
        await client.hang_up()
        await until(lambda: bed.backend("d").running == 0)
        assert gate.aborted == 1
        assert await freed(bed, "p") == [bed.sink.records[0].id]
        assert outstanding(bed) == 0


@pytest.mark.parametrize("answers", [True, False])
async def test_a_prefill_engine_that_is_gone_begins_anew_elsewhere_once(answers: bool) -> None:
    """Whether its connection breaks in the same moment or never."""
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        gates = {name: Gate(bed.backend(name)) for name in "pq"}
        bed.backend("d", Script(hang_after=0), Script())
        client = bed.send(STREAMED)
        await until(lambda: bed.backend("d").running == 1)
        first = next(name for name, gate in gates.items() if gate.calls)
        other = gates["q" if first == "p" else "p"]
        if answers:
            gates[first].fails()
        bed.gateway.runtime.instance_down(first, "test")
        await until(lambda: other.calls == 1)
        other.ends()
        assert (await client.done()).status == 200
        assert other.calls == 1
        assert len(bed.sink.records) == 1
        await asyncio.sleep(0.01)
        assert outstanding(bed) == 0


async def test_what_became_of_an_earlier_attempt_is_no_news_of_one_at_a_collocated_engine() -> None:
    """Its prefill engine breaks and is found dead in one moment, in which the request is sent whole to another one."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        gate = Gate(bed.backend("p"))
        bed.backend("d", Script(hang_after=0))
        client = bed.send(STREAMED)
        await until(lambda: bed.backend("d").running == 1)
        bed.gateway.configure(fleet(p="prefill", d="decode", c="collocated"))
        await bed.gateway.monitor.settle(1)
        bed.backend("c", Script(token_delay_s=0.02))
        runtime = bed.gateway.runtime
        runtime._suspect = lambda name: runtime.instance_down(name, "test")
        gate.fails()
        answer = await client.done()
        assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "c")
        assert (len(bed.backend("c").calls), bed.backend("c").aborted, len(bed.sink.records)) == (1, [], 1)
        await asyncio.sleep(0.01)
        assert outstanding(bed) == 0


async def test_many_at_once_are_all_answered_once() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode", e="decode")) as bed:
        for name in "pq":
            bed.backend(name, replace(EARLY, first_delay_s=0.01))
        for name in "de":
            bed.backend(name, Script(first_delay_s=0.02))
        clients = [bed.send(completion(stream=bool(i % 2))) for i in range(40)]
        answers = [await client.done() for client in clients]
        assert {answer.status for answer in answers} == {200}
        assert len(bed.sink.records) == 40
        assert sum(len(bed.backend(name).calls) for name in "de") == 40
        await asyncio.sleep(0.01)
        assert outstanding(bed) == 0


async def test_through_real_engines_kv_moves_beside_its_prefill_and_the_answer_is_the_same(monkeypatch) -> None:
    monkeypatch.setenv("FLEET_TOKEN", "fleet-secret")
    kv = ("--kv-layers", "4", "--kv-token-bytes", "1024", "--no-enable-prefix-caching", "--shutdown-timeout", "0")
    options = ("--model", "demo", "--max-model-len", "512", "--kv-blocks", "64", *kv)
    body = completion(prompt=list(range(1, 301)), max_tokens=6, ignore_eos=True, seed=1)
    with (
        EngineProcess(*options, "--profile", "constant:800ms", "--role", "prefill") as p,
        EngineProcess(*options, "--profile", "constant:2ms", "--role", "decode") as d,
    ):
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            specs = [
                InstanceSpec("p", "demo", p.url, "reference", Role.PREFILL),
                InstanceSpec("d", "demo", d.url, "reference", Role.DECODE),
            ]
            async with ServerBed(specs, session) as bed:
                texts = []
                for stream in (True, False):
                    answer = await bed.ask({**body, "stream": stream})
                    assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "d")
                    events = [event for event in answer.events if event != "[DONE]"] if stream else [answer.body]
                    texts.append("".join(json.loads(event)["choices"][0]["text"] for event in events))
                    (one,) = transfers(bed)
                    assert (one["outcome"], one["measured_by"], one["tokens"]) == ("done", "engine", 300)
                    assert 0 < one["early_bytes"] < one["bytes"] == 4 * 1024 * 300
            async with session.post(f"{d.url}/v1/completions", json={**body, "model": "demo"}) as alone:
                texts.append((await alone.json())["choices"][0]["text"])
    assert len(set(texts)) == 1


# ---- when a transfer began and ended --------------------------------------------------------------------------------


def tells(bed: TestBed, name: str) -> FakeBackend:
    backend = bed.backend(name)
    backend.capabilities = replace(backend.capabilities, tells_landing=True)
    return backend


async def test_a_whole_answers_transfer_ends_when_its_engine_says_so() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        tells(bed, "d").scripts = [Script(first_delay_s=0.2, moved=MOVED)]
        client = bed.send(completion())
        await until(lambda: bed.backend("d").running == 1)
        await asyncio.sleep(0.01)
        (name,) = bed.gateway.runtime.flights
        assert bed.gateway.runtime.handoff.migrator.state_of(name) is State.COMMITTED
        assert transfers_so_far(bed) == ["kv_landed"], "long before the answer"
        assert (await client.done()).status == 200


async def hangs(call: UpstreamCall) -> AsyncIterator[Chunk]:
    """No answer, not even headers."""
    await asyncio.Event().wait()
    yield Chunk("accepted")


@pytest.mark.parametrize(("stream", "reason"), [(True, "placed_timeout"), (False, "moving_timeout")])
async def test_an_engine_that_does_not_answer_is_given_up_and_the_kv_used_elsewhere(stream: bool, reason: str) -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        migrator = bed.gateway.runtime.handoff.migrator
        migrator.config = replace(migrator.config, placed_timeout_s=0.05, moving_timeout_s=0.05)
        tells(bed, "d").generate = hangs
        tells(bed, "e").scripts = [Script(moved=MOVED)]
        answer = await bed.ask(completion(stream=stream))
        assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "e")
        undone, done = transfers(bed)
        assert (undone["reason"], undone["outcome"], done["outcome"]) == (reason, "undone", "done")
        assert len(bed.backend("p").calls) == 1


async def test_a_whole_answer_that_fails_before_its_kv_landed_is_not_prefilled_again() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        tells(bed, "d").scripts = [Script(refuse_status=502)]
        tells(bed, "e").scripts = [Script(moved=MOVED)]
        assert (await bed.ask(completion())).status == 200
        assert len(bed.backend("p").calls) == 1


async def test_whole_answers_that_fail_one_after_the_other_close_their_link() -> None:
    """Of an engine that does not tell: the end of the transfer is only assumed, and says nothing good of the link."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(cut_after=0))
        answer = await bed.ask(completion())
        assert answer.status == 503
        links = bed.gateway.runtime.handoff.migrator.links
        assert not links.usable(("p", "d"), bed.gateway.runtime.clock())


# ---- nothing is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
async def test_a_placement_that_raises_loses_no_request(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        migrator = bed.gateway.runtime.handoff.migrator
        choose, left = migrator.placement.choose, [times]

        def sometimes(*args: object) -> object:
            if left[0]:
                left[0] -= 1
                raise RuntimeError("a defect")
            return choose(*args)

        monkeypatch.setattr(type(migrator.placement), "choose", lambda self, *args: sometimes(*args))
        answers = [await client.done() for client in [bed.send(STREAMED) for _ in range(4)]]
        assert {answer.status for answer in answers} == {200}
        assert len(bed.sink.records) == 4


async def test_a_request_that_the_migrator_lost_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        migrator = bed.gateway.runtime.handoff.migrator
        handle, left = migrator.handle, [2]  # with the others, and alone

        def breaks(events: Sequence[ev.Event], now: float) -> ev.Reply:
            done = [event for event in events if isinstance(event, ev.PrefillDone)]
            if done and left[0]:
                left[0] -= 1
                for event in done:
                    migrator._forget(event.request.id)
                raise RuntimeError("a defect")
            return handle(events, now)

        monkeypatch.setattr(migrator, "handle", breaks)
        answer = await bed.ask(STREAMED)
        assert answer.status == 200
        assert ("place", "migrator_failed") in kinds(bed)
        assert len(bed.backend("p").calls) == 2


async def test_roles_of_instances_that_left_are_forgotten() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        for index in range(5):
            bed.gateway.configure(fleet(**{f"p{index}": "prefill", "d": "decode"}))
            await bed.gateway.monitor.settle(1)
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert sorted(bed.gateway.runtime.handoff._roles) == ["d", "p4"]
