"""Bursts leave at the promised pace; nothing is lost, reordered or slowed beyond its promise."""

import asyncio
import math
from typing import Any

import pytest

from api.openai.gateway import Gateway, GatewayOptions
from api.openai.pacer import Pacer, paced
from controller.core.types import Targets
from tests.api.openai.gateways import TestBed, completion
from workers.backends.fake import Script

PACE_S = 0.02


def token(number: int) -> bytes:
    return b'data: {"choices":[{"text":"t%d"}]}\n\n' % number


DONE = b"data: [DONE]\n\n"


class Client:
    """Takes messages, with the loop's time of each."""

    def __init__(self) -> None:
        self.got: list[tuple[float, bytes]] = []
        self.ended = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if message["body"]:
                self.got.append((asyncio.get_running_loop().time(), message["body"]))
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
    return Pacer(client, PACE_S, asyncio.get_running_loop().time, carries)


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def test_a_burst_becomes_even():
    client = Client()
    send = pacer(client)
    await send(part(b"".join(token(i) for i in range(6)) + DONE, more=False))
    assert client.bytes == b"".join(token(i) for i in range(6)) + DONE
    assert client.ended
    first, *others = client.token_times
    assert all(at - first >= (k + 1) * PACE_S - 0.002 for k, at in enumerate(others))


async def test_the_relay_is_not_held_up():
    client = Client()
    send, loop = pacer(client), asyncio.get_running_loop()
    began = loop.time()
    for i in range(10):
        await send(part(token(i)))
    assert loop.time() - began < 5 * PACE_S
    await send(part(DONE, more=False))
    assert client.bytes == b"".join(token(i) for i in range(10)) + DONE


async def test_late_tokens_leave_at_once_and_do_not_delay_those_after_them():
    client = Client()
    send, loop = pacer(client), asyncio.get_running_loop()
    await send(part(token(0)))
    await asyncio.sleep(6 * PACE_S)
    began = loop.time()
    await send(part(token(1) + token(2) + token(3), more=False))
    assert loop.time() - began < 3 * PACE_S  # all three are overdue already


async def test_a_client_that_hangs_up_ends_the_waiting():
    client = Client()
    last = asyncio.create_task(pacer(client)(part(b"".join(token(i) for i in range(1000)), more=False)))
    await asyncio.sleep(2.5 * PACE_S)
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await last
    left = len(client.got)
    await asyncio.sleep(3 * PACE_S)
    assert len(client.got) <= left + 1
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
    client = Client()
    assert paced(client, targets, share, lambda: 0.0, carries) is client
    assert paced(client, Targets(1.0, 0.05), 0.9, lambda: 0.0, carries) is not client


@pytest.mark.parametrize(("share", "least_s"), [(0.0, 0.0), (0.5, 5 * 0.5 * 0.04)])
async def test_the_setting_paces_a_whole_gateways_streams(share, least_s):
    """Six tokens that come at once, a TPOT of 40 ms: with half of it as pace the last one leaves 100 ms later."""
    bed, session = TestBed(), None
    bed.gateway = Gateway(GatewayOptions("test", token_pacing=share), session, bed.sink)  # type: ignore[arg-type]
    async with bed:
        bed.every(Script(tokens=6))
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await bed.ask(completion(max_tokens=6, stream=True, target_ttft=2.0, target_tbt=0.04))
        took = loop.time() - began
    assert answer.events[-1] == "[DONE]"
    assert len(answer.events) == 7
    assert took >= least_s
    assert len(bed.sink.records) == 1
    if not share:
        assert took < 5 * 0.5 * 0.04 + 0.5


async def test_a_response_is_paced_by_its_deltas():
    bed, session = TestBed(), None
    bed.gateway = Gateway(GatewayOptions("test", token_pacing=0.5), session, bed.sink)  # type: ignore[arg-type]
    async with bed:
        bed.every(Script(tokens=6))
        loop = asyncio.get_running_loop()
        began = loop.time()
        body = {"model": "demo", "input": "hello", "stream": True, "target_ttft": 2.0, "target_tbt": 0.04}
        answer = await bed.ask(body, "/v1/responses")
        assert answer.body.count(b"event: response.output_text.delta") == 6
        assert answer.body.endswith(b"\n\n")
        assert loop.time() - began >= 5 * 0.5 * 0.04 - 0.005
