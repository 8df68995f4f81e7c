"""One request in flight through the gateway: what is kept of it, and the relay of its answer from engine to client.

What is kept is little enough that ten thousand requests may wait at once.

The relay passes bytes on as they come and takes first-token and inter-token times, once, for everybody. Nothing reaches
the client before the first token (the opening event of a chat stream waits for it), so that a request whose engine dies
early can run elsewhere. After it, a failure ends the stream with one error event in OpenAI's shape and without
`[DONE]`: clients that look for `[DONE]` see an incomplete answer, those that parse events see why.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from contextlib import aclosing
from dataclasses import replace
from hashlib import sha256
from typing import Any, Protocol

from api.openai.asgi import EVENT_STREAM, NO_CACHE, Header, Send, respond
from api.openai.protocol.errors import ApiError
from api.openai.protocol.schemas import NamedPlace, NamedStep
from api.openai.protocol.step_answers import Captured
from api.openai.protocol.translation import Translation
from controller.core.decisions import Decision
from controller.core.kv_links import BorrowedKv, KvMoved
from controller.core.types import Request
from controller.predict.answer_lengths import AnswerBounds, Foretold
from controller.predict.lengths import NO_TEXT, PromptText
from workers.backends.base import (
    MOST_TOLD_TOKENS,
    AnswerChunk,
    Backend,
    CallTargets,
    EngineError,
    UpstreamCall,
    Usage,
)
from workers.backends.hints import hints_of

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MOST_HELD_BYTES = 1 << 20  # of events before the first token, which wait for it
RESPONSES = "/v1/responses"  # served as a chat completion


REFINE_TOKENS = 50  # of output between two predictions of its bound (Concord 4.1)


class InFlightRequest:
    """What only the gateway knows of a request: its connections and what passed over them. Its state is the scheduler's
    (`Scheduler.state_of`). `started`: a byte of its answer went out. `over`: nothing more goes to its client, which the
    scheduler hears with the next batch. Times are the driver's monotonic seconds, except `arrived_wall` (epoch). The
    parsed body is not kept."""

    __slots__ = (
        "arrived_wall",
        "assumes_first_token",
        "branch_of",
        "call",
        "call_number",
        "captured",
        "charged_tokens",
        "chat",
        "checkpoint_s",
        "context_tokens",
        "decisions",
        "error",
        "follows",
        "foretold",
        "head",
        "instance",
        "judging",
        "keep_usage",
        "key_id",
        "moved",
        "named",
        "offer",
        "output_tokens",
        "over",
        "overstated",
        "paired",
        "prefill",
        "prefill_instance",
        "quota",
        "reasoning_tokens",
        "refine_at",
        "refined",
        "request",
        "salt",
        "send",
        "sends",
        "sent_at",
        "source",
        "started",
        "step",
        "stored",
        "streamed",
        "task",
        "text",
        "timed",
        "times",
        "translation",
        "two_stages",
        "usage",
        "waits_until",
        "workflow_due",
    )

    def __init__(
        self,
        request: Request,
        head: bytes,
        send: Send,
        arrived_wall: float,
        *,
        chat: bool,
        streamed: bool,
        keep_usage: bool,
        text: PromptText = NO_TEXT,
        charged_tokens: int = 0,
        source: str = "defaults",
        translation: Translation | None = None,
        context_tokens: int = MOST_TOLD_TOKENS,
        foretold: Foretold | None = None,
    ) -> None:
        self.request = request
        self.foretold = foretold  # of the length of its answer, at its arrival
        self.refine_at = math.inf if foretold is None or foretold.bounds is None else REFINE_TOKENS  # tokens out
        self.refined: AnswerBounds | None = None  # the last ones that were predicted while it runs
        self.judging: tuple[AnswerBounds, ...] = ()  # those that will judge the forest, see `with_bounds`
        self.head = head
        self.send = send
        self.arrived_wall = arrived_wall
        self.chat, self.streamed, self.keep_usage = chat, streamed, keep_usage
        self.text = text
        self.charged_tokens = charged_tokens  # what the tokens-a-minute quota was charged at arrival
        self.quota: tuple[Header, ...] = ()  # x-ratelimit-*, as of its admission
        self.source = source  # where the targets came from: explicit, class, priority, tenant_default, defaults
        self.translation = translation
        # Whether its workflow has a deadline, when that is, an earlier end of its waiting time, its number among calls.
        self.timed, self.workflow_due, self.waits_until, self.call_number = False, math.inf, math.inf, 0
        self.follows = self.stored = False  # it got the answer of another request's call; or one that was kept
        self.step: NamedStep | None = None  # whose answer is to be kept
        self.named = NamedPlace("", None)  # in its workflow
        self.captured: Captured | None = None  # that answer
        self.checkpoint_s = 0.0  # how long its KV is to stay at its engine, for branches
        self.branch_of = ""  # whose checkpoint it goes on from
        self.key_id, self.salt = 0, b""  # of the API key that it came with; of its tenant, for engines' prefix caches
        self.started = self.over = False
        self.instance = self.prefill_instance = ""  # prefill: where its KV was computed, if it decodes elsewhere
        self.moved: KvMoved | None = None  # how that KV came, as its decode engine measured it
        self.task: asyncio.Task[None] | None = None  # relays its answer
        self.prefill: asyncio.Task[None] | None = None  # its prefill stage, while that runs
        self.call: UpstreamCall | None = None  # for both stages, when disaggregated
        self.offer: bytes | None = None  # where its KV can be pulled from, once its prefill is nearly over
        self.paired = False  # both stages begin together
        self.two_stages = False  # prefilled for another engine at least once: KV transfers are kept for it
        self.sent_at: float | None = None
        self.sends = 0  # attempts on engines
        self.times: array[float] | None = None  # arrival of every token, streamed
        self.output_tokens = self.reasoning_tokens = 0  # reasoning: of those, before the first one of the answer
        self.context_tokens = context_tokens  # of its model
        self.usage: Usage | None = None  # as far as it can be true (`counted`)
        self.overstated = False  # its engine counted more than that
        self.assumes_first_token: asyncio.TimerHandle | None = None  # not streamed: when it is expected
        self.decisions: list[dict[str, Any]] | None = None
        self.error: EngineError | None = None  # of its last failed call, until the scheduler says what follows

    @property
    def prompt_tokens(self) -> int:
        """As its engine counts them, or as expected."""
        return self.usage.prompt_tokens if self.usage else self.request.prompt_tokens + self.request.shared_tokens

    def upstream_call(self, rank: int, *, whole: bool = True) -> UpstreamCall:
        """`whole`: one instance serves both stages. Where it decodes alone no branch could go on from its KV: requests
        go to instances that prefill."""
        path = CHAT if self.chat else COMPLETIONS
        request = self.request
        now = request.arrival if self.sent_at is None else self.sent_at
        targets = CallTargets(request.targets.ttft_s, request.targets.tpot_s, now - request.arrival, request.value)
        return UpstreamCall(
            *(request.id, path, self.head, rank, self.streamed, self.keep_usage),
            targets=targets,
            salt=self.salt,
            checkpoint_s=self.checkpoint_s if whole else 0.0,
            branch_of=self.branch_of,
            hints=hints_of(request, now, self.workflow_due, self.waits_until),
        )

    def later(self, call: UpstreamCall, now: float) -> UpstreamCall:
        """The call as it is made `now`: less of its time is left."""
        if call.targets is None:
            return call
        targets = call.targets._replace(waited_s=now - self.request.arrival)
        hints = hints_of(self.request, now, self.workflow_due, self.waits_until)
        return replace(call, targets=targets, hints=hints)

    def note(self, decision: Decision) -> None:
        """Keep a decision in the compact form of the record; `at` is seconds after arrival."""
        step = {
            "kind": decision.kind,
            "reason": decision.reason,
            "subject": decision.subject,
            "at": round(decision.at - self.request.arrival, 6),
            "figures": dict(decision.figures),
        }
        if decision.rejected:
            step["rejected"] = dict(decision.rejected)
        self.decisions = [*(self.decisions or ()), step]

    def delivered(self, tokens: int, now: float, reasoning: int = 0) -> None:
        """`tokens` reached the gateway now. `reasoning`: of all so far, before the answer. What comes between parts of
        it, as between tool calls, counts as answer."""
        if self.times is None:
            self.times = array("d")
        self.reasoning_tokens = reasoning
        for _ in range(tokens):
            self.times.append(now)
        self.output_tokens += tokens

    def identify(self) -> None:
        """Give the request the fingerprint that it has whenever this tenant sends it, so that it is known again."""
        if not self.request.fingerprint:
            what = sha256(b"chat " if self.chat else b"text ")
            what.update(self.request.tenant.encode() + b"\0")
            what.update(self.head)
            self.request.fingerprint = what.hexdigest()

    def restart(self) -> None:
        """Back to the queue after a failure before the first token, when nothing of it runs any more."""
        self.prefill_instance = ""
        self.moved = None
        self.times = None
        self.output_tokens = self.reasoning_tokens = 0
        self.usage = None
        self.task = self.prefill = self.call = self.offer = None
        self.paired = False

    def stop_answer(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None
        if self.assumes_first_token is not None:
            self.assumes_first_token.cancel()
            self.assumes_first_token = None

    def stop_prefill(self) -> bool:
        """False if no prefill ran."""
        task, self.prefill = self.prefill, None
        if task is None:
            return False
        task.cancel()
        return True

    def counted(self, usage: Usage | None) -> None:
        """Its engine's count, cut to the context of its model and the answer that was asked for: a wrong one must not
        use up its tenant's quota or teach the predictions."""
        if usage is None:
            self.usage = None
            return
        context, asked = self.context_tokens, self.request.max_tokens
        longest = context if asked is None else min(asked, context)
        self.usage = Usage(min(usage.prompt_tokens, context), min(usage.completion_tokens, longest))
        self.overstated = self.overstated or self.usage != usage

    def headers(self) -> list[Header]:
        """Its id (also under OpenAI's name), class, instance and time in the queue, and its tenant's quota."""
        request = self.request
        waited = (self.sent_at - request.arrival) * 1000 if self.sent_at is not None else 0.0
        return [
            (b"x-slackline-request-id", request.id.encode()),
            (b"x-slackline-class", _header_text(request.slo_class)),
            (b"x-slackline-instance", _header_text(self.instance)),
            (b"x-slackline-queue-ms", b"%.1f" % waited),
            (b"x-request-id", request.id.encode()),
            *self.quota,
        ]


def _header_text(value: str) -> bytes:
    return value.encode("ascii", "replace")


# ---- the relay ------------------------------------------------------------------------------------------------------


class Borrowings(Protocol):
    def borrowed(self, in_flight: InFlightRequest, instance: str, borrowed: BorrowedKv, now: float) -> None: ...


class RelayListener(Protocol):
    """Is told what happens to a request at its engine. `transfers`: keeps what engines say of KV from others."""

    @property
    def transfers(self) -> Borrowings: ...

    def clock(self) -> float: ...

    def accepted(self, in_flight: InFlightRequest) -> None: ...

    def pulling(self, in_flight: InFlightRequest) -> None: ...

    def pulled(self, in_flight: InFlightRequest) -> None: ...

    def first_token(self, in_flight: InFlightRequest, now: float) -> None: ...

    def progressed(self, in_flight: InFlightRequest, now: float) -> None: ...

    def completed(self, in_flight: InFlightRequest, now: float) -> None: ...

    def lost(self, in_flight: InFlightRequest, error: EngineError) -> None: ...


async def relay(in_flight: InFlightRequest, backend: Backend, call: UpstreamCall, driver: RelayListener) -> None:
    """One attempt on one engine. Cancelling it closes the call to the engine."""
    held, told = b"", False
    try:
        async with aclosing(backend.generate(call)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if chunk.borrowed is not None and not told:  # once: an engine that repeats it must not fill the record
                    told = True
                    driver.transfers.borrowed(in_flight, in_flight.instance, chunk.borrowed, driver.clock())
                if chunk.kind == "data":
                    if chunk.pulling:
                        driver.pulling(in_flight)
                    if chunk.moved is not None:
                        in_flight.moved = chunk.moved
                        driver.pulled(in_flight)
                    held = await _data(in_flight, chunk, held, driver)
                elif chunk.kind == "body":
                    await _whole(in_flight, chunk, driver)
                else:
                    in_flight.moved = chunk.moved
                    driver.accepted(in_flight)
                    if chunk.moved is not None:
                        driver.pulled(in_flight)
    except EngineError as error:
        if not in_flight.over:
            driver.lost(in_flight, error)


async def _data(in_flight: InFlightRequest, chunk: AnswerChunk, held: bytes, driver: RelayListener) -> bytes:
    """Relay whole events. Returns the bytes that must still wait for the first token."""
    if chunk.tokens:
        first, now = in_flight.times is None, driver.clock()
        in_flight.delivered(chunk.tokens, now, chunk.reasoning)
        driver.first_token(in_flight, now) if first else driver.progressed(in_flight, now)
    if chunk.usage is not None:
        in_flight.counted(chunk.usage)
    if not in_flight.started:
        if not chunk.tokens and not chunk.done:
            if len(held) > MOST_HELD_BYTES:
                raise EngineError(f"the engine sent more than {MOST_HELD_BYTES} bytes without a token")
            return held + chunk.raw
        await start_stream(in_flight)
    if in_flight.captured is not None:
        in_flight.captured.add(held + chunk.raw)
    raw = _translated(in_flight, held + chunk.raw)
    if chunk.done:
        driver.completed(in_flight, driver.clock())
    if raw or chunk.done:
        await in_flight.send({"type": "http.response.body", "body": raw, "more_body": not chunk.done})
    return b""


async def start_stream(in_flight: InFlightRequest) -> None:
    in_flight.started = True
    headers = [EVENT_STREAM, NO_CACHE, *in_flight.headers()]
    await in_flight.send({"type": "http.response.start", "status": 200, "headers": headers})


async def _whole(in_flight: InFlightRequest, chunk: AnswerChunk, driver: RelayListener) -> None:
    if in_flight.captured is not None:
        in_flight.captured.add(chunk.raw)
    raw = _translated(in_flight, chunk.raw)
    in_flight.counted(chunk.usage)
    in_flight.started = True
    driver.completed(in_flight, driver.clock())
    await respond(in_flight.send, 200, raw, in_flight.headers())


def _translated(in_flight: InFlightRequest, raw: bytes) -> bytes:
    return raw if in_flight.translation is None else in_flight.translation.translate(raw)


async def end_with_error(in_flight: InFlightRequest, error: ApiError, *, started: bool) -> None:
    """Answer with an error: as a response, or as the last event of a stream that has begun."""
    if started:
        await in_flight.send(
            {"type": "http.response.body", "body": _translated(in_flight, error.event()), "more_body": False}
        )
    else:
        headers = [*in_flight.headers(), *error.headers()]
        await respond(in_flight.send, error.status, error.body(), headers)
