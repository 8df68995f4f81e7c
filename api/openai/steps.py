"""Steps of workflows whose answers are kept (`metadata.step_key`), so that a client that died goes on where it was.

A step that has an answer is not computed again: whoever asks for it with the same body gets that answer. Only tenants
with a retention keep any. While Redis is unavailable steps are computed, and their answers are not kept.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import orjson

from api.openai.asgi import EVENT_STREAM, NO_CACHE, respond
from api.openai.in_flight import InFlightRequest
from api.openai.protocol.errors import ApiError
from api.openai.protocol.schemas import NamedStep, Parsed
from api.openai.protocol.step_answers import Captured, events_of
from controller.core.decisions import Decision, Figure
from controller.core.snapshot import TenantConfig
from workers.backends.base import Usage
from workers.live import LiveUnavailable, Talks
from workers.log_lines import RepeatedLine
from workers.steps import LARGEST_BYTES, forget_steps, keep_step, read_step

log = logging.getLogger(__name__)

READ_S = 0.25  # longest that Redis may take to answer; then the step is computed
AT_ONCE = 4  # reads of one tenant, and as many writes: those of others must find a connection
MOST_WAITING = 64  # answers of one tenant that wait to be written; those of others are lost

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class StoredStep(NamedTuple):
    """`by`: id of the request that computed it. `kept_at`: epoch seconds on the clock that gateways share."""

    by: str
    kept_at: float
    whole: dict[str, Any]
    state_ref: str = ""

    @property
    def usage(self) -> Usage:
        told = self.whole.get("usage") or {}
        return Usage(told.get("prompt_tokens") or 0, told.get("completion_tokens") or 0)


class TenantLane:
    """Of one tenant."""

    def __init__(self) -> None:
        self.reads = asyncio.Semaphore(AT_ONCE)
        self.writes = asyncio.Semaphore(AT_ONCE)
        self.waiting = 0


class Steps:
    """`board` None: a gateway that runs alone keeps none. `counts`: what came of reads and writes, by its word."""

    def __init__(self, now: Callable[[], float], spawn: Spawn) -> None:
        self.board: Talks | None = None
        self.counts: Counter[str] = Counter()
        self.retentions: dict[str, int] = {}  # seconds, by tenant
        self._now = now
        self._spawn = spawn
        self._lanes: dict[str, TenantLane] = {}
        self._not_kept = RepeatedLine(log, "the answer of a step was not kept: %s")
        self._not_forgotten = RepeatedLine(log, "answers of steps were not forgotten: %s")

    def configure(self, tenants: tuple[TenantConfig, ...]) -> None:
        """Answers of a tenant that keeps them less long from now on, or none, are forgotten."""
        before, self.retentions = self.retentions, {tenant.name: tenant.retention_s for tenant in tenants}
        for tenant, retention_s in before.items():
            if retention_s > self.retentions.get(tenant, 0):
                self.forget(tenant, None)

    # ---- read -----------------------------------------------------------------------------------------------------

    async def find(self, parsed: Parsed, tenant: TenantConfig) -> StoredStep | None:
        """What is kept of the request's step; None if nothing is. Raises ApiError."""
        step = parsed.step
        if step is None:
            return None
        raw = await self._read(tenant.name, step)
        if raw is None:
            return None
        try:
            told = orjson.loads(raw)
            found = StoredStep(told["by"], told["kept_at"], told["whole"], told.get("state_ref", ""))
            asked = bytes.fromhex(told["asked"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            self.counts["unreadable"] += 1
            return None
        if self._now() - found.kept_at > tenant.retention_s:
            return None
        if asked != step.asked:
            self.counts["other_body"] += 1
            told = f"metadata.step_key: step {step.key!r} of this workflow has an answer to another body."
            raise ApiError("step_exists", told, param="metadata.step_key", final=True)
        self.counts["found"] += 1
        return found

    async def _read(self, tenant: str, step: NamedStep) -> bytes | None:
        if self.board is None:
            return None
        try:
            async with asyncio.timeout(READ_S), self.lane(tenant).reads:
                return await self.board.run(read_step(tenant, step.workflow, step.key))
        except (LiveUnavailable, TimeoutError):
            self.counts["unread"] += 1
            return None

    def lane(self, tenant: str) -> TenantLane:
        """What bounds how much of Redis this tenant takes at once."""
        return self._lanes.setdefault(tenant, TenantLane())

    def replay(self, in_flight: InFlightRequest, stored: StoredStep, now: float) -> None:
        """The request is answered with what is stored: nothing is computed, and no engine is asked."""
        in_flight.usage = stored.usage
        in_flight.output_tokens = stored.usage.completion_tokens
        in_flight.times = array("d", [now]) * max(1, in_flight.output_tokens)
        in_flight.follows = in_flight.over = True
        age_s = round(max(0.0, self._now() - stored.kept_at), 3)
        figures: dict[str, Figure] = {"age_s": age_s, "of_request": stored.by}
        in_flight.note(Decision("step", "stored_step", in_flight.request.id, now, figures))
        self._spawn(_send(in_flight, stored))

    # ---- write ----------------------------------------------------------------------------------------------------

    def keep(self, in_flight: InFlightRequest) -> None:
        """The request has ended well. Its answer is written in the background."""
        step, captured, tenant = in_flight.step, in_flight.captured, in_flight.request.tenant
        retention_s = self.retentions.get(tenant, 0)
        if self.board is None or step is None or not retention_s:
            return
        lane = self.lane(tenant)
        if captured is None or captured.too_large:
            self.counts["too_large"] += 1
        elif lane.waiting >= MOST_WAITING:
            self.counts["too_many_waiting"] += 1
        elif (raw := self._stored(in_flight, step, captured)) is not None:
            lane.waiting += 1
            self._spawn(self._keep(self.board, tenant, step, raw, retention_s))

    def _stored(self, in_flight: InFlightRequest, step: NamedStep, captured: Captured) -> bytes | None:
        whole = captured.whole(chat=in_flight.chat, streamed=in_flight.streamed, usage=in_flight.usage)
        if whole is None:
            self.counts["unreadable"] += 1
            return None
        told = {"by": in_flight.request.id, "kept_at": self._now(), "asked": step.asked.hex(), "whole": whole}
        if step.state_ref:
            told["state_ref"] = step.state_ref
        raw = orjson.dumps(told)
        if len(raw) > LARGEST_BYTES:
            self.counts["too_large"] += 1
            return None
        return raw

    async def _keep(self, board: Talks, tenant: str, step: NamedStep, raw: bytes, retention_s: float) -> None:
        lane = self.lane(tenant)
        try:
            async with lane.writes:
                came = await board.run(keep_step(tenant, step.workflow, step.key, raw, retention_s))
            self.counts[came] += 1
        except LiveUnavailable as error:
            self._not_kept.write(error)
            self.counts["unwritten"] += 1
        finally:
            lane.waiting -= 1

    # ---- forget ---------------------------------------------------------------------------------------------------

    def forget(self, tenant: str, workflow: str | None) -> None:
        """Those of a workflow, or all of the tenant, in the background. What stays for want of Redis ends by itself."""
        if self.board is not None:
            self._spawn(self._forget(self.board, tenant, workflow))

    async def _forget(self, board: Talks, tenant: str, workflow: str | None) -> None:
        try:
            gone = await board.run(forget_steps(tenant, workflow))
            self.counts["forgotten"] += gone  # not in one with the above: others count meanwhile
        except LiveUnavailable as error:
            self._not_forgotten.write(error)

    async def forgotten(self, tenant: str, workflow: str) -> int:
        """The same for a client that waits for it: how many. Raises ApiError."""
        try:
            if self.board is None:
                raise LiveUnavailable("this gateway runs alone")
            gone = await self.board.run(forget_steps(tenant, workflow))
        except LiveUnavailable:
            told = "Answers of steps cannot be forgotten now. Try again shortly."
            raise ApiError("workflows_unavailable", told, retry_after_s=1.0) from None
        self.counts["forgotten"] += gone
        return gone


async def _send(in_flight: InFlightRequest, stored: StoredStep) -> None:
    headers = [*in_flight.headers(), (b"x-slackline-stored", stored.by.encode())]
    if stored.state_ref:
        headers.append((b"x-slackline-state-ref", stored.state_ref.encode()))
    translate = in_flight.translation.translate if in_flight.translation is not None else bytes
    if not in_flight.streamed:
        await respond(in_flight.send, 200, translate(orjson.dumps(stored.whole)), headers)
        return
    events = events_of(stored.whole, chat=in_flight.chat, keep_usage=in_flight.keep_usage)
    start = {"type": "http.response.start", "status": 200, "headers": [EVENT_STREAM, NO_CACHE, *headers]}
    await in_flight.send(start)
    await in_flight.send({"type": "http.response.body", "body": translate(events), "more_body": False})
