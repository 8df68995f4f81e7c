"""The driver between dispatcher and engines: what the dispatcher hears, and what a failing pass must not lose."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from controller.core import events as ev
from controller.core.types import Outcome
from tests.api.openai.gateways import TestBed, completion, settled, snapshot
from tests.waiting import until_on_loop
from workers.backends.fake import Script


class Ear:
    """Notes what the dispatcher hears; `failing` names event types of which the next one makes it raise, once.

    `late`: it raises after it has handled the batch, so that its actions are lost.
    """

    def __init__(self, bed: TestBed, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[ev.Event] = []
        self.failing: set[type] = set()
        self.late = False
        self._handle = bed.gateway.scheduler.dispatcher.handle
        monkeypatch.setattr(bed.gateway.scheduler.dispatcher, "handle", self.handle)

    def handle(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        if found := self.failing & {type(event) for event in events}:
            self.failing -= found
            if self.late:
                self._handle(events, now)
            raise ZeroDivisionError
        self.heard += events
        return self._handle(events, now)

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.heard]


def prefill_expected_in(
    prefill_s: float, bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> list[asyncio.TimerHandle | None]:
    """Every prefill is expected to take this long. Returns the timers of assumed first tokens, one for each send.

    The runtime looks up what performs an action in its table, so that is where it is replaced.
    """
    runtime, timers = bed.gateway.runtime, list[asyncio.TimerHandle | None]()
    send = runtime.performs[ev.Send]

    def timed(action: ev.Send) -> None:
        send(action._replace(prefill_s=prefill_s))
        timers.append(runtime.requests[action.request.id].assumes_first_token)

    monkeypatch.setitem(runtime.performs, ev.Send, timed)
    return timers


def _waiting(bed: TestBed, instance: str) -> int:
    return sum(
        state.waiting for state in bed.gateway.scheduler.dispatcher.fleet(bed.gateway.clock()) if state.id == instance
    )


async def test_a_whole_answers_prompt_stops_waiting_when_its_prefill_should_be_over() -> None:
    async with TestBed(snapshot(("e1",))) as bed:
        bed.every(Script(hang_after=0))
        client = bed.send(completion(stream=False))
        await until_on_loop(lambda: bed.backend("e1").running == 1)
        assert _waiting(bed, "e1") == 1
        await until_on_loop(lambda: _waiting(bed, "e1") == 0)
        assert bed.backend("e1").running == 1
        await client.hang_up()
        (record,) = bed.sink.records
        assert record.ttft_s is None


async def test_a_streamed_answers_first_token_is_never_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TestBed(snapshot(("e1",))) as bed:
        timers = prefill_expected_in(0.0, bed, monkeypatch)
        bed.every(Script(hang_after=0))
        ear = Ear(bed, monkeypatch)
        client = bed.send(completion(stream=True))
        await until_on_loop(lambda: bed.backend("e1").running == 1)
        await settled()
        assert timers == [None]
        assert "FirstToken" not in ear.kinds()
        await client.hang_up()


async def test_no_first_token_is_assumed_for_a_request_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TestBed(snapshot(("e1",))) as bed:
        timers = prefill_expected_in(3600.0, bed, monkeypatch)
        ear = Ear(bed, monkeypatch)
        assert (await bed.ask(completion())).status == 200
        await until_on_loop(lambda: "Finished" in ear.kinds())
        (timer,) = timers
        assert timer is not None
        assert timer.cancelled()
        assert "FirstToken" not in ear.kinds()


@pytest.mark.parametrize("late", [False, True])
async def test_a_failing_pass_loses_no_end_of_a_request(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    async with TestBed(snapshot(("e1",))) as bed:
        ear = Ear(bed, monkeypatch)
        ear.failing, ear.late = {ev.Finished}, late
        assert (await bed.ask(completion())).status == 200
        await until_on_loop(lambda: "Finished" in ear.kinds())
        (state,) = bed.gateway.scheduler.dispatcher.fleet(bed.gateway.clock())
        assert (state.waiting, state.running) == (0, 0)


@pytest.mark.parametrize("late", [False, True])
async def test_a_failing_pass_leaves_no_client_waiting(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Late: the dispatcher believes that it has sent the request."""
    async with TestBed(snapshot(("e1",))) as bed:
        ear = Ear(bed, monkeypatch)
        ear.failing, ear.late = {ev.Arrived}, late
        answer = await bed.ask(completion())
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        (record,) = bed.sink.records
        assert record.outcome == Outcome.FAILED
        await until_on_loop(lambda: "Cancelled" in ear.kinds())
        assert _waiting(bed, "e1") == 0
        assert (await bed.ask(completion())).status == 200


async def test_a_request_that_waits_survives_a_failing_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TestBed(snapshot(("e1",)), policy="fcfs_window") as bed:
        bed.every(Script(hang_after=0))
        clients: list[Any] = [bed.send(completion(stream=True)) for _ in range(60)]
        await until_on_loop(lambda: bed.backend("e1").running + len(bed.gateway.scheduler.dispatcher.queue()) == 60)
        waiting = len(bed.gateway.scheduler.dispatcher.queue())
        assert waiting > 0
        ear = Ear(bed, monkeypatch)
        ear.failing = {ev.Cancelled}
        await clients[0].hang_up()
        await until_on_loop(lambda: "Cancelled" in ear.kinds())
        assert [record.outcome for record in bed.sink.records] == [Outcome.CANCELLED]
        assert len(bed.gateway.runtime.requests) == 59
        await asyncio.gather(*(client.hang_up() for client in clients[1:]))
