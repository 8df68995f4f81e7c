"""Bursts leave at the promised pace; nothing is lost, reordered or slowed beyond its promise."""

import asyncio
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from api.openai import pacer as pacing
from api.openai.gateway import Gateway, GatewayOptions
from api.openai.pacer import Pacer, paced
from controller.core.types import Targets
from tests.api.openai.gateways import Client as ApiClient
from tests.api.openai.gateways import TestBed, completion, settled
from tests.waiting import until_on_loop
from workers.backends.fake import Script

PACE_S = 0.02


def token(number: int) -> bytes:
    return b'data: {"choices":[{"text":"t%d"}]}\n\n' % number


DONE = b"data: [DONE]\n\n"


class Time:
    """A clock that stands still until it is moved, and the only `sleep` that the pacer knows."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, woken))
        await woken

    @property
    def asleep(self) -> int:
        return sum(not woken.done() for _, woken in self._sleepers)

    async def pass_by(self, seconds: float) -> None:
        """Wake who is due on the way, in the order of their times."""
        end = self.now + seconds
        await settled()
        while due := [each for each in self._sleepers if each[0] <= end and not each[1].done()]:
            self.now, woken = min(due, key=lambda each: each[0])
            woken.set_result(None)
            await settled()
        self.now = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    there = SimpleNamespace(
        sleep=found.sleep, get_running_loop=asyncio.get_running_loop, CancelledError=asyncio.CancelledError
    )
    monkeypatch.setattr(pacing, "asyncio", there)
    return found


class Client:
    """Takes messages, with the clock's time of each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.got: list[tuple[float, bytes]] = []
        self.ended = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if message["body"]:
                self.got.append((self.clock(), message["body"]))
            self.ended |= not message["more_body"]

    @property
    def bytes(self) -> bytes:
        return b"".join(body for _, body in self.got)

    @property
    def token_times(self) -> list[float]:
        return [at for at, body in self.got if b"text" in body]


def carries(event: bytes) -> bool:
    return b"text" in event


def pacer(client: Client) -> Pacer:
    return Pacer(client, PACE_S, client.clock, carries)


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def test_a_burst_becomes_even(clock):
    client = Client(clock)
    began = clock.now
    last = asyncio.create_task(pacer(client)(part(b"".join(token(i) for i in range(6)) + DONE, more=False)))
    await clock.pass_by(5.5 * PACE_S)
    await last
    assert client.bytes == b"".join(token(i) for i in range(6)) + DONE
    assert client.ended
    assert client.token_times == pytest.approx([began + k * PACE_S for k in range(6)])


async def test_the_relay_is_not_held_up(clock):
    client = Client(clock)
    send = pacer(client)
    for i in range(10):
        await send(part(token(i)))  # returns although no time passes
    await settled()
    assert (client.bytes, clock.asleep) == (token(0), 1)
    last = asyncio.create_task(send(part(DONE, more=False)))
    await clock.pass_by(9.5 * PACE_S)
    await last
    assert client.bytes == b"".join(token(i) for i in range(10)) + DONE


async def test_late_tokens_leave_at_once_and_do_not_delay_those_after_them(clock):
    client = Client(clock)
    send = pacer(client)
    await send(part(token(0)))
    await clock.pass_by(6 * PACE_S)
    await send(part(token(1) + token(2) + token(3), more=False))  # all three are overdue already
    assert client.token_times[1:] == [clock.now] * 3


async def test_a_client_that_hangs_up_ends_the_waiting(clock):
    client = Client(clock)
    last = asyncio.create_task(pacer(client)(part(b"".join(token(i) for i in range(1000)), more=False)))
    await clock.pass_by(2.5 * PACE_S)
    assert (len(client.got), clock.asleep) == (3, 1)
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await last
    await clock.pass_by(3 * PACE_S)
    assert (len(client.got), clock.asleep) == (3, 0)
    assert not client.ended


@pytest.mark.parametrize(
    ("targets", "share"),
    [
        (Targets(1.0, 0.05), 0.0),
        (Targets(1.0, math.inf), 0.9),
        (Targets(1.0, 0.0), 0.9),
        (Targets(1.0, 0.05, 20.0), 0.9),
    ],
)
def test_what_is_not_paced(targets, share):
    client = Client(lambda: 0.0)
    assert paced(client, targets, share, lambda: 0.0, carries) is client
    assert paced(client, Targets(1.0, 0.05), 0.9, lambda: 0.0, carries) is not client


def paced_bed(share: float, clock: Time) -> TestBed:
    bed, session = TestBed(), None
    bed.gateway = Gateway(GatewayOptions("test", token_pacing=share), session, bed.sink)  # type: ignore[arg-type]
    bed.gateway.clock = bed.gateway.runtime.clock = clock
    return bed


async def ended_after(asked: ApiClient, clock: Time) -> float:
    """Seconds until the whole answer has left, to 5 ms."""
    began = clock.now
    await until_on_loop(lambda: clock.asleep or asked.answer.ended.is_set())
    while not asked.answer.ended.is_set():
        assert clock.asleep, "nothing but the pacer keeps it"
        await clock.pass_by(0.005)
    return clock.now - began


@pytest.mark.parametrize(("share", "took_s"), [(0.0, 0.0), (0.5, 5 * 0.5 * 0.04)])
async def test_the_setting_paces_a_whole_gateways_streams(clock, share, took_s):
    """Six tokens that come at once, a TPOT of 40 ms: with half of it as pace the last one leaves 100 ms later."""
    async with paced_bed(share, clock) as bed:
        bed.every(Script(tokens=6))
        asked = bed.send(completion(max_tokens=6, stream=True, target_ttft=2.0, target_tbt=0.04))
        assert await ended_after(asked, clock) == pytest.approx(took_s, abs=0.0051)
        answer = await asked.done()
    assert answer.events[-1] == "[DONE]"
    assert len(answer.events) == 7
    assert len(bed.sink.records) == 1


async def test_a_response_is_paced_by_its_deltas(clock):
    async with paced_bed(0.5, clock) as bed:
        bed.every(Script(tokens=6))
        body = {"model": "demo", "input": "hello", "stream": True, "target_ttft": 2.0, "target_tbt": 0.04}
        asked = bed.send(body, "/v1/responses")
        assert await ended_after(asked, clock) == pytest.approx(5 * 0.5 * 0.04, abs=0.0051)
        answer = await asked.done()
        assert answer.body.count(b"event: response.output_text.delta") == 6
        assert answer.body.endswith(b"\n\n")
