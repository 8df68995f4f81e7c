"""A scriptable engine inside the process, for tests and for trying the gateway without a server.

Each call takes the next script; the last one repeats. The chunks are those of a real adapter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from controller.core.kv_links import KvMoved, LinkReport
from controller.core.types import InstanceSpec, Load, Role
from workers.backends.base import (
    BACKENDS,
    AnswerChunk,
    Capabilities,
    EngineError,
    Limits,
    NotSupported,
    PrefillAnswer,
    RoleSwitch,
    UpstreamCall,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Script:
    """How one call goes. Times in seconds; `cut_after` and `hang_after` count tokens, None: never."""

    tokens: int = 4
    reasoning: int = 0  # of them, before the answer; only of chats that are streamed
    prompt_tokens: int = 8
    first_delay_s: float = 0.0
    token_delay_s: float = 0.0
    refuse_status: int = 0  # answer this status instead of accepting
    unreachable: bool = False  # nothing listens
    cut_after: int | None = None  # 0: accepted, then lost before the first token
    hang_after: int | None = None
    prefill_done: bool = False  # a prefill whose first token is the last
    early: bool = False  # a prefill whose last step begins when it is accepted
    moved: KvMoved | None = None  # what a decode stage reports of the KV it pulled


@BACKENDS.register("fake")
class FakeBackend:
    """Keeps every call in `calls`, those closed before their end in `aborted`, and the requests whose KV it was told to
    free in `freed`. `link_reports` is what it reports of its links."""

    capabilities = Capabilities(disaggregates=True, frees_kv=True, links=True, checkpoints=True)

    def __init__(
        self,
        spec: InstanceSpec,
        session: aiohttp.ClientSession | None = None,
        limits: Limits | None = None,
        scripts: Sequence[Script] = (Script(),),
    ) -> None:
        self.spec = spec
        self.scripts = list(scripts)
        self.calls: list[UpstreamCall] = []
        self.aborted: list[str] = []
        self.freed: list[str] = []
        self.renewed: list[str] = []
        self.bounds: dict[str, tuple[int, int]] = {}
        self.link_reports: list[LinkReport] = []
        self.running = 0
        self.load = Load(observed_at=0.0)
        self.dead = False
        self.deadly = b""  # a call whose head has this ends the engine, and all calls that it serves

    async def generate(self, call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.calls.append(call)
        self.running += 1
        ended = False
        try:
            if script.unreachable or self.dead:
                raise EngineError(f"instance {self.spec.id} cannot be reached", unreachable=True)
            if script.refuse_status:
                body = b'{"error":{"message":"scripted refusal","type":"test","param":null,"code":"scripted"}}'
                raise EngineError("scripted refusal", status=script.refuse_status, body=body)
            yield AnswerChunk("accepted", moved=script.moved)
            if self.deadly and self.deadly in call.head:
                await asyncio.sleep(script.first_delay_s)
                self.dead = True
                raise self._lost()
            async for chunk in self._answer(call, script):
                yield chunk
            ended = True
        except EngineError:
            ended = True
            raise
        finally:
            self.running -= 1
            if not ended:
                self.aborted.append(call.request_id)

    async def prefill(self, call: UpstreamCall, ending: Callable[[bytes], None] | None = None) -> PrefillAnswer:
        """The next script, up to its first token."""
        script, offer = replace(self.scripts[0], tokens=1), b'{"from":"%s"}' % self.spec.id.encode()
        async for chunk in self.generate(replace(call, streamed=False)):
            if chunk.kind == "accepted" and script.early and ending is not None:
                ending(offer)
        return PrefillAnswer(offer, script.prefill_done)

    async def _answer(self, call: UpstreamCall, script: Script) -> AsyncIterator[AnswerChunk]:
        usage = Usage(script.prompt_tokens, script.tokens)
        for index in range(script.tokens):
            await self._pace(script, index)
            if call.streamed:
                thinks = index < script.reasoning and "chat" in call.path
                raw = self._thought(index) if thinks else self._event(call, index)
                reasoning = min(index + 1, script.reasoning) if "chat" in call.path else 0
                yield AnswerChunk("data", raw, tokens=1, reasoning=reasoning)
        if not call.streamed:
            text = " ".join(f"t{i}" for i in range(script.tokens))
            yield AnswerChunk("body", self._body(call, text, usage), usage=usage)
            return
        last = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n' % usage
        yield AnswerChunk("data", (last if call.keep_usage else b"") + b"data: [DONE]\n\n", usage=usage, done=True)

    async def _pace(self, script: Script, index: int) -> None:
        if script.cut_after == index:
            raise self._lost()
        if script.hang_after == index:
            await asyncio.Event().wait()
        await asyncio.sleep(script.first_delay_s if index == 0 else script.token_delay_s)
        if self.dead:
            raise self._lost()

    def _lost(self) -> EngineError:
        return EngineError(f"instance {self.spec.id} cannot be reached", unreachable=True, lost=True)

    def _thought(self, index: int) -> bytes:
        return b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"t%d "}}]}\n\n' % index

    def _event(self, call: UpstreamCall, index: int) -> bytes:
        if "chat" in call.path:
            return b'data: {"choices":[{"index":0,"delta":{"content":"t%d "}}]}\n\n' % index
        return b'data: {"choices":[{"index":0,"text":"t%d "}]}\n\n' % index

    def _body(self, call: UpstreamCall, text: str, usage: Usage) -> bytes:
        said = b'"message":{"role":"assistant","content":"%s"}' if "chat" in call.path else b'"text":"%s"'
        head = b'{"object":"fake","choices":[{"index":0,' + said % text.encode() + b',"finish_reason":"stop"}],'
        return head + b'"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % usage

    async def free_kv(self, request_ids: Sequence[str]) -> None:
        self.freed += request_ids

    async def renew_kv(self, request_id: str, lease_s: float) -> bool:
        self.renewed.append(request_id)
        return request_id not in self.freed and not self.dead

    async def tell_bounds(self, bounds: Mapping[str, tuple[int, int]]) -> None:
        self.bounds.update(bounds)

    async def links(self) -> Sequence[LinkReport]:
        return self.link_reports

    async def telemetry(self, now: float) -> Load:
        if self.dead:
            raise EngineError(f"instance {self.spec.id} cannot be reached", unreachable=True)
        return self.load._replace(observed_at=now, running=self.running)

    async def ready(self) -> bool:
        return not self.dead and self.load.awake

    async def meeting(self) -> bytes:
        raise NotSupported("A fake engine takes its stages one after the other.")

    async def role_settings(self) -> Mapping[str, Any]:
        return {}

    async def role(self) -> Role:
        return self.spec.role

    async def set_role(self, role: Role, settings: Mapping[str, Any] | None = None) -> RoleSwitch:
        old, self.spec.role = self.spec.role, role
        return RoleSwitch(old, role, already=old is role)

    def then(self, **changes: object) -> FakeBackend:
        """This backend, whose next calls differ from the last script by `changes`."""
        self.scripts.append(replace(self.scripts[-1], **changes))  # type: ignore[arg-type]
        return self
