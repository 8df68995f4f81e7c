"""KV of a prefill that is left for a more urgent one: when it is offered, what of it moves, and how it may end.

The same with a real model: tests/workers/engine/torch/test_suspended.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import orjson
import pytest

from controller.core.steps import Chunk, Seq, Step
from tests.waiting import until_on_loop
from tests.workers.engine.suspended import LAYERS, NEAR, Asked, HandDevice, Pair, Part, listening, turns
from workers.engine.config import parse
from workers.engine.kv import disaggregation
from workers.engine.kv.disaggregation import PrefillEndings
from workers.engine.text.streams import Stream

PROMPT = [(7 * i) % 250 for i in range(90)]
OTHER = [(11 * i + 3) % 250 for i in range(70)]
TOKEN_BYTES = 64
OPTIONS = (
    *("--port", "0", "--host", "127.0.0.1", "--model", "tiny", "--max-model-len", "160", "--kv-blocks", "64"),
    *("--kv-layers", str(LAYERS), "--kv-token-bytes", str(TOKEN_BYTES), "--no-enable-prefix-caching"),
    *("--profile", "constant:1ms", "--scheduler", "slackline"),
)


@pytest.fixture
async def pair(fleet_token) -> AsyncIterator[Pair]:
    prefill = Part(parse([*OPTIONS, "--role", "prefill"]), TOKEN_BYTES)
    decode = Part(parse([*OPTIONS, "--role", "decode"]), TOKEN_BYTES)
    device = HandDevice(prefill.engine)
    prefill.engine.attach(device)
    async with listening(Pair(prefill, decode, device)) as pair:
        yield pair


@pytest.fixture(autouse=True)
def looks_often(monkeypatch) -> None:
    monkeypatch.setattr(disaggregation, "LOOK_S", 0.0)


class FakeEngine:
    """As much of one as says when a prompt is nearly computed."""

    def __init__(self, whole_prompts: bool) -> None:
        self.scheduler = SimpleNamespace(whole_prompts=whole_prompts)
        self.computing: int | None = 1
        self.passed = 0
        self.on_resume: Callable[[int], None] = lambda step_id: None

    def layers_done(self, step_id: int) -> int:
        return self.passed if step_id == 1 else 0


def begun(whole_prompts: bool, last: bool = True) -> tuple[FakeEngine, asyncio.Task[bool]]:
    """A step of a prompt that has just begun, and somebody who waits for it to be nearly over."""
    engine, seq = FakeEngine(whole_prompts), Seq("s", 0.0, 64, 1)
    endings = PrefillEndings(engine, LAYERS)
    endings.begin(seq)
    endings.began(Step(1, (Chunk(seq, 0, 64, last),), (), 0), [seq] if last else [])
    return engine, asyncio.ensure_future(endings.near(Stream(seq, (), wake_each=False)))


@pytest.mark.parametrize(("whole_prompts", "last"), [(False, True), (False, False), (True, True)])
async def test_the_last_of_several_steps_is_near_as_it_begins(whole_prompts, last):
    _, near = begun(whole_prompts, last)
    await turns()
    assert near.done() == (last and not whole_prompts)
    near.cancel()


async def test_a_step_is_not_near_while_it_does_not_compute():
    """Though it passes a layer before it stops."""
    engine, near = begun(whole_prompts=True)
    engine.passed = NEAR - 1
    await turns()
    engine.computing, engine.passed = None, NEAR
    await turns()
    engine.computing = 2
    await turns()
    assert not near.done()
    engine.computing = 1
    engine.on_resume(1)
    assert await near


async def offered(pair: Pair, prompt: list[int], **more: str) -> Asked:
    prefill = pair.compute(prompt, **more)
    pair.device.let(NEAR)
    await until_on_loop(lambda: bool(prefill.offer))
    return prefill


async def pulled_and_suspended(pair: Pair) -> tuple[Asked, Asked]:
    """All layers it has passed are at the decode engine; it lies suspended, and something urgent runs."""
    prefill = await offered(pair, PROMPT, request_id="long")
    decode = pair.take(PROMPT, prefill.offer)
    await pair.came(NEAR, PROMPT)
    pair.urgent()
    await pair.suspended()
    return prefill, decode


async def test_a_prompt_in_one_step_is_offered_when_few_of_its_layers_are_left(pair):
    prefill = pair.compute(PROMPT)
    pair.device.let(NEAR - 1)
    await pair.passed(NEAR - 1)
    await turns()
    assert prefill.status == 0
    pair.device.let(1)
    await until_on_loop(lambda: prefill.status == 200)
    assert "first_token" not in prefill.offer
    assert prefill.body == b""
    pair.device.let(LAYERS)
    await prefill.done()
    assert prefill.choice["finish_reason"] == "length"
    pair.prefill.disaggregation.free([orjson.loads(prefill.body)["id"]])
    await pair.nothing_left()


async def test_nothing_is_offered_of_one_that_lies_suspended_until_it_goes_on(pair, monkeypatch):
    """It has passed layers enough; but nobody looked in time."""
    monkeypatch.setattr(disaggregation, "LOOK_S", 1000.0)
    text = await pair.alone(PROMPT)
    prefill = pair.compute(PROMPT)
    pair.device.let(NEAR)
    await pair.passed(NEAR)
    urgent = pair.urgent()
    await turns()
    monkeypatch.setattr(disaggregation, "LOOK_S", 0.0)
    await pair.suspended()
    await turns()
    assert prefill.status == 0
    pair.device.let(LAYERS)  # all of the urgent one, which no more is left for the other
    await urgent.done()
    await until_on_loop(lambda: bool(prefill.offer))
    assert prefill.body == b""
    decode = pair.take(PROMPT, prefill.offer)
    pair.device.let(LAYERS)
    assert (await decode.done()).text == text
    await pair.nothing_left()


async def test_one_that_is_asked_to_stop_is_not_offered_any_more(pair, monkeypatch):
    prefill = pair.compute(PROMPT)
    pair.device.let(NEAR - 1)
    await pair.passed(NEAR - 1)
    pair.urgent()
    engine = pair.prefill.engine
    await until_on_loop(lambda: engine.scheduler.rounds.signals == 1)
    assert (engine.on_device, engine.computing) == (True, None)
    await pair.suspended()
    await turns()
    assert prefill.status == 0
    pair.device.let(10 * LAYERS)
    await prefill.done()
    pair.prefill.disaggregation.free([orjson.loads(prefill.body)["id"]])
    await pair.nothing_left()


async def test_one_that_goes_on_ends_with_the_tokens_of_an_undisturbed_one(pair):
    text = await pair.alone(PROMPT)
    prefill, decode = await pulled_and_suspended(pair)
    pair.device.let(10 * LAYERS)
    assert (await decode.done()).text == text
    assert text.startswith((await prefill.done()).choice["text"])
    whole = LAYERS * pair.prefill.token_bytes * len(PROMPT)
    assert decode.moved["bytes"] == whole
    assert decode.moved["early_bytes"] >= NEAR * whole / LAYERS
    assert pair.prefill.engine.scheduler.rounds.resumes == 1
    await pair.nothing_left()


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_one_that_is_aborted_ends_its_transfer_and_holds_nothing(pair, hangs_up):
    """While it lies there."""
    prefill, decode = await pulled_and_suspended(pair)
    if hangs_up:
        prefill.hang_up()
    else:
        pair.prefill.engine.abort_all(["long"])
    await decode.done()
    error = orjson.loads(decode.body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
    assert error["kv"]["reason"] == "kv_lost"
    assert prefill.choice["finish_reason"] == "abort"
    pair.device.let(10 * LAYERS)
    await pair.nothing_left()


async def test_one_whose_offer_no_one_took_is_aborted_too(pair):
    prefill = await offered(pair, PROMPT, request_id="long")
    pair.urgent()
    await pair.suspended()
    pair.prefill.engine.abort_all(["long"])
    late = pair.take(PROMPT, prefill.offer)
    await late.done()
    assert orjson.loads(late.body.split(b"\n\n")[0].removeprefix(b"data: "))["error"]["kv"]["reason"] == "kv_lost"
    pair.device.let(10 * LAYERS)
    await pair.nothing_left()


async def test_a_decode_engine_that_goes_away_meanwhile_leaves_it_to_be_taken_by_another(pair):
    text = await pair.alone(PROMPT)
    prefill, decode = await pulled_and_suspended(pair)
    decode.hang_up()
    await decode.done()
    again = pair.take(PROMPT, prefill.offer)
    await pair.came(NEAR, PROMPT)
    pair.device.let(10 * LAYERS)
    assert (await again.done()).text == text
    await pair.nothing_left()


async def test_one_that_loses_what_it_computed_is_sent_as_it_is_computed_again(pair):
    text = await pair.alone(PROMPT)
    _, decode = await pulled_and_suspended(pair)
    pair.prefill.engine.pause(release_kv=True)
    pair.device.let(LAYERS)  # what runs ends, and nothing else begins
    await until_on_loop(lambda: not pair.prefill.engine.on_device)
    assert pair.prefill.engine.scheduler.blocks.usage == 0
    pair.prefill.engine.resume()
    pair.device.let(10 * LAYERS)
    assert (await decode.done()).text == text
    await pair.nothing_left()


async def test_of_two_in_one_step_one_is_aborted_and_the_other_goes_on(pair):
    text = await pair.alone(OTHER)
    before = pair.urgent()
    await pair.passed(0)
    both = [pair.compute(PROMPT, request_id="long"), pair.compute(OTHER)]
    await until_on_loop(lambda: pair.prefill.engine.streams == 3)
    pair.device.let(LAYERS)
    await before.done()
    pair.device.let(NEAR)
    await until_on_loop(lambda: all(prefill.offer for prefill in both))
    assert pair.prefill.engine.scheduler.rounds.batched == 1
    first, second = (pair.take(prompt, asked.offer) for prompt, asked in zip((PROMPT, OTHER), both, strict=True))
    await pair.came(NEAR, PROMPT + OTHER)
    pair.urgent()
    await pair.suspended()
    pair.prefill.engine.abort_all(["long"])
    await first.done()
    pair.device.let(10 * LAYERS)
    assert (await second.done()).text == text
    assert b"kv_lost" in first.body
    await pair.nothing_left()
