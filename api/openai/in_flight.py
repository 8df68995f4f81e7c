"""One request on its way through the gateway: little enough that ten thousand may wait at once."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any, Protocol

from api.openai.asgi import Header, Send
from controller.core.decisions import Decision
from controller.core.kv_links import KvMoved
from controller.core.types import Request
from controller.dispatch.lifecycle import State
from controller.predict.lengths import NO_TEXT, PromptText
from workers.backends.base import EngineError, Promise, UpstreamCall, Usage

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"  # served as a chat completion


class UnreadableAnswer(EngineError):
    """What the engine answered cannot be told in the client's words. Another engine would answer the same."""

    def __init__(self) -> None:
        super().__init__("The engine's answer cannot be read.")


class Translation(Protocol):
    """For a client that does not speak the engines' API."""

    def told(self, raw: bytes) -> bytes:
        """The engine's answer, or whole events of it, in the client's words. Raises Unreadable."""
        ...


class InFlightRequest:
    """`state` is what its client may see: QUEUED, SENT, ANSWERING once a byte went out, ENDED. All times are the
    driver's monotonic seconds but `arrived_wall` (epoch). The parsed body is not kept."""

    __slots__ = (
        "arrived_wall",
        "assumes_first_token",
        "call",
        "charged_tokens",
        "chat",
        "decisions",
        "head",
        "instance",
        "keep_usage",
        "moved",
        "offer",
        "output_tokens",
        "paired",
        "prefill",
        "prefill_instance",
        "quota",
        "request",
        "send",
        "sends",
        "sent_at",
        "source",
        "state",
        "streamed",
        "task",
        "text",
        "times",
        "translation",
        "two_stages",
        "usage",
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
    ) -> None:
        self.request = request
        self.head = head
        self.send = send
        self.arrived_wall = arrived_wall
        self.chat = chat
        self.streamed = streamed
        self.keep_usage = keep_usage
        self.text = text
        self.charged_tokens = charged_tokens  # what the tokens-a-minute quota was charged at arrival
        self.quota: tuple[Header, ...] = ()  # x-ratelimit-*, as of its admission
        self.source = source  # where the targets came from: explicit, class, priority, tenant_default, defaults
        self.translation = translation
        self.state = State.QUEUED
        self.instance = ""
        self.prefill_instance = ""  # where its KV was computed, once its decode stage is placed elsewhere
        self.moved: KvMoved | None = None  # how that KV came, where its decode engine says so
        self.task: asyncio.Task[None] | None = None  # relays its answer
        self.prefill: asyncio.Task[None] | None = None  # the other stage, where it has two and that one runs
        self.call: UpstreamCall | None = None  # of one with two stages, for both
        self.offer: bytes | None = None  # where its KV waits, once its prefill is nearly over
        self.paired = False  # both stages begin together
        self.two_stages = False  # it was prefilled for another engine at least once: KV transfers are kept for it
        self.sent_at: float | None = None
        self.sends = 0  # attempts on engines
        self.times: array[float] | None = None  # arrival of every token, streamed
        self.output_tokens = 0
        self.usage: Usage | None = None
        self.assumes_first_token: asyncio.TimerHandle | None = None  # one that nobody sees
        self.decisions: list[dict[str, Any]] | None = None

    def upstream_call(self, rank: int) -> UpstreamCall:
        path = CHAT if self.chat else COMPLETIONS
        request = self.request
        waited = self.sent_at - request.arrival if self.sent_at is not None else 0.0
        promise = Promise(request.targets.ttft_s, request.targets.tpot_s, waited, request.value)
        return UpstreamCall(request.id, path, self.head, rank, self.streamed, self.keep_usage, promise=promise)

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

    def delivered(self, tokens: int, now: float) -> None:
        """`tokens` reached us now."""
        if self.times is None:
            self.times = array("d")
        for _ in range(tokens):
            self.times.append(now)
        self.output_tokens += tokens

    def restart(self) -> None:
        """Back to the queue after a failure before the first token. Nothing of it runs any more."""
        self.state = State.QUEUED
        self.prefill_instance = ""
        self.moved = None
        self.times = None
        self.output_tokens = 0
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
        """False if none ran."""
        task, self.prefill = self.prefill, None
        if task is None:
            return False
        task.cancel()
        return True

    def headers(self) -> list[Header]:
        """x-slackline-*: who served it and how long it waited for that; its id under OpenAI's name too; its quota."""
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
