"""A prefill engine that preempts and a decode engine in the test's own loop; the test says how far the former gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from inspect import signature
from types import ModuleType
from typing import Any, Protocol

import orjson

from controller.core.steps import Sampled, Step, StepDone, Suspended
from tests.waiting import until_on_loop
from tests.workers.engine.client import COMPLETIONS, events_of
from workers.engine.config import ServerConfig
from workers.engine.engine import Engine
from workers.engine.http.asgi import App
from workers.engine.kv.disaggregation import Disaggregation
from workers.engine.server import build
from workers.engine.text.pseudo_text import token_at

LAYERS, NEAR = 8, 6  # a step that has passed so many is nearly over
TOKENS = 12
WAIT_S = 20.0


class Device(Protocol):
    def let(self, layers: int) -> None:
        """Whatever runs there may pass so many more."""
        ...


def of_pairs(cases: ModuleType) -> dict[str, Callable[..., Any]]:
    """The tests of a module that take a pair, and its fixture `looks_often`, for another one with a pair of its own."""
    found = {name: each for name, each in vars(cases).items() if name.startswith("test_")}
    taken = {name: test for name, test in found.items() if "pair" in signature(test).parameters}
    return {"looks_often": cases.looks_often, **taken}


async def turns() -> None:
    """Everything that is ready has its turn: enough for a word that nobody should say."""
    for _ in range(50):
        await asyncio.sleep(0)


class Asked:
    """One request to an engine: `headers` once they are out, `done` with the whole body."""

    def __init__(self, app: App, body: dict[str, Any]) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self._messages = asyncio.Queue[dict[str, Any]]()
        self._messages.put_nowait({"type": "http.request", "body": orjson.dumps(body)})
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
        self.task = asyncio.ensure_future(app(scope, self._messages.get, self._send))

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]

    def hang_up(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def done(self) -> Asked:
        async with asyncio.timeout(WAIT_S):
            await self.task
        return self

    @property
    def offer(self) -> dict[str, Any]:
        """The early one; empty before it is out."""
        found: dict[str, Any] = orjson.loads(self.headers.get(b"x-slackline-kv-offer", b"{}"))
        return found

    @property
    def choice(self) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(self.body)["choices"][0]
        return found

    @property
    def text(self) -> str:
        """Of a stream that ended well."""
        events = events_of(self.body)
        assert events[-1] == b"[DONE]", events
        return "".join(orjson.loads(event)["choices"][0]["text"] for event in events[:-1])

    @property
    def moved(self) -> dict[str, Any]:
        """What a stream said of how its KV came."""
        comment = next(event for event in self.body.split(b"\n\n") if event.startswith(b": kv "))
        found: dict[str, Any] = orjson.loads(comment[5:])
        return found


class Pair:
    """`device`: the prefill engine's. The decode engine's steps run by themselves."""

    def __init__(self, prefill: Part, decode: Part, device: Device) -> None:
        self.prefill, self.decode = prefill, decode
        self.device = device
        self._asked: list[Asked] = []
        self._before = 0  # bytes at the decode engine when it was last asked to take something over

    def ask(self, part: Part, prompt: Sequence[int], **more: Any) -> Asked:
        same = {"prompt": list(prompt), "ignore_eos": True, "temperature": 0, "max_tokens": TOKENS, "target_ttft": 5000}
        self._asked.append(Asked(part.app, same | more))
        return self._asked[-1]

    def compute(self, prompt: Sequence[int], **more: Any) -> Asked:
        params = {"do_remote_decode": True, "early": True}
        return self.ask(self.prefill, prompt, max_tokens=1, kv_transfer_params=params, **more)

    def take(self, prompt: Sequence[int], offer: dict[str, Any]) -> Asked:
        self._before = self.decode.disaggregation.traffic.received_bytes
        return self.ask(self.decode, prompt, kv_transfer_params=offer, stream=True)

    def urgent(self, prompt: Sequence[int] = (3, 1, 4, 1, 5)) -> Asked:
        return self.ask(self.prefill, prompt, max_tokens=1, target_ttft=500)

    async def alone(self, prompt: Sequence[int]) -> str:
        """What one engine says, undisturbed."""
        return (await self.ask(self.decode, prompt, stream=True).done()).text

    async def passed(self, layers: int) -> None:
        """Return when the running step has."""
        engine = self.prefill.engine
        await until_on_loop(lambda: engine.computing is not None and engine.layers_done(engine.computing) == layers)

    async def came(self, layers: int, prompt: Sequence[int]) -> None:
        """Return when so much of the KV that was asked for last is at the decode engine, and nothing more comes."""
        traffic = self.decode.disaggregation.traffic
        whole = self._before + layers * self.prefill.token_bytes * len(prompt)
        await until_on_loop(lambda: traffic.received_bytes >= whole)
        await turns()
        assert traffic.received_bytes == whole

    async def suspended(self, count: int = 1) -> None:
        rounds = self.prefill.engine.scheduler.rounds
        await until_on_loop(lambda: rounds.signals == count)
        self.device.let(1)
        await until_on_loop(lambda: rounds.preempts == count)

    async def nothing_left(self) -> None:
        """All are answered, and nothing is held on either side."""
        for asked in self._asked:
            await asked.done()
        for part in (self.prefill, self.decode):
            scheduler = part.engine.scheduler
            await until_on_loop(lambda of=scheduler: of.idle)
            scheduler.check()
            assert scheduler.blocks.usage == 0
            assert (part.engine.streams, part.disaggregation.kept, part.engine.failed) == (0, 0, False)


class Part:
    """One engine, wired as the server wires it."""

    def __init__(self, config: ServerConfig, token_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        disaggregation: Disaggregation | None
        self.app, self.engine, disaggregation = build(config, loop)
        assert disaggregation is not None
        self.disaggregation = disaggregation
        self.token_bytes = token_bytes


@asynccontextmanager
async def listening(pair: Pair) -> AsyncIterator[Pair]:
    parts = (pair.prefill, pair.decode)
    for part in parts:
        await part.disaggregation.start(0)
    try:
        yield pair
    finally:
        pair.device.let(10_000)
        for part in parts:
            part.disaggregation.close()
            part.engine.close()


class HandDevice:
    """An executor whose steps pass layers when they are let. One that shall stop stops inside the layer that it enters
    next, as at an operator's end, and passes it when it goes on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: dict[int, Step] = {}
        self._passed: dict[int, int] = {}
        self._inside: set[int] = set()
        self._running: int | None = None
        self._asked = False
        self._left = 0

    def let(self, layers: int) -> None:
        self._left += layers
        self._go()

    def start(self, step: Step) -> None:
        self._steps[step.id], self._passed[step.id] = step, 0
        self.resume(step.id)

    def suspend(self, step_id: int) -> None:
        assert step_id == self._running
        self._asked = True

    def resume(self, step_id: int) -> None:
        self._running, self._asked = step_id, False
        asyncio.get_running_loop().call_soon(self._go)

    def discard(self, step_id: int) -> None:
        del self._steps[step_id], self._passed[step_id]
        self._inside.discard(step_id)

    def layers_done(self, step_id: int) -> int:
        return self._passed.get(step_id, 0)

    def close(self) -> None:
        self._running = None

    def _go(self) -> None:
        while (step_id := self._running) is not None and (self._left or step_id in self._inside):
            if step_id in self._inside:
                self._inside.remove(step_id)
            else:
                self._left -= 1
                if self._asked:
                    self._inside.add(step_id)
                    self._running = None
                    self._engine.handle(Suspended(step_id, 0.001))
                    continue
            self._passed[step_id] += 1
            if self._passed[step_id] == LAYERS:
                self._running = None
                self._engine.handle(self._end(self._steps.pop(step_id)))

    def _end(self, step: Step) -> StepDone:
        seqs = [*(chunk.seq for chunk in step.chunks if chunk.last), *step.decodes]
        return StepDone(step.id, [Sampled(seq, token_at(seq.seed, seq.output_tokens)) for seq in seqs], 0.001)
