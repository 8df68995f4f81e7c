"""What every engine adapter offers the gateway, and the value objects that cross that border.

An adapter belongs to one instance. It never decides, never retries on another instance and keeps no request state
beyond the open response, so that the dispatcher stays the only place that knows what runs where.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import aiohttp

from controller.core.errors import SlacklineError
from controller.core.registry import Registry
from controller.core.types import InstanceSpec, Load


@dataclass(frozen=True, slots=True)
class Limits:
    """Outbound time limits in seconds; every one explicit, none inherited from a library default."""

    connect_s: float = 2.0  # TCP connection to the engine
    headers_s: float = 60.0  # request sent to response headers, streamed calls
    between_chunks_s: float = 120.0  # longest silence inside a stream; a queued prompt counts here too
    total_s: float = 900.0  # one call from first byte out to last byte in; the only limit of a non-streamed call
    telemetry_s: float = 1.0  # one read of /metrics or /health
    control_s: float = 60.0  # sleep and wake move gigabytes


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can be asked for, so that nobody calls what it lacks."""

    priority: bool = True  # honours a per-request rank
    abort_by_id: bool = False  # an explicit call; without it closing the connection aborts
    sleep: bool = False  # frees and restores device memory
    set_role: bool = False  # switches prefill and decode at run time
    profile: bool = False  # tells its latency coefficients in /server_info
    handover: bool = False  # prefills for another engine, and goes on from KV that another one computed


class Usage(NamedTuple):
    """Token counts as the engine itself reports them."""

    prompt_tokens: int
    completion_tokens: int


class Prefilled(NamedTuple):
    """A prompt's KV waits at the engine that computed it. `offer`: JSON that only another engine of its kind reads, b""
    where the engines find it by themselves. `done`: the first token was the last, nothing is left to decode."""

    offer: bytes
    done: bool


ChunkKind = Literal["accepted", "data", "body"]


class Chunk(NamedTuple):
    """One piece of an answer.

    `accepted`: headers came (no bytes). `data`: whole server-sent events to relay as they are, `tokens` of them with
    text, `done` when `[DONE]` is among them. `body`: the complete answer of a non-streamed call.
    """

    kind: ChunkKind
    raw: bytes = b""
    tokens: int = 0
    usage: Usage | None = None
    done: bool = False


class Promise(NamedTuple):
    """What a request was promised, for engines whose own scheduler reads it: seconds from its arrival at the gateway,
    of which `waited_s` had passed when it was sent. Infinite: not promised."""

    ttft_s: float
    tpot_s: float
    waited_s: float = 0.0
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class UpstreamCall:
    """One request as an engine gets it. `head` is the JSON body without its closing brace.

    The rank is known only when the dispatcher sends, so the adapter appends its own fields and the brace: the parsed
    body need not be kept while the request is queued. A streamed one's head asks for usage (`include_usage`).
    """

    request_id: str
    path: str  # "/v1/completions" or "/v1/chat/completions"
    head: bytes
    rank: int  # lower is more urgent
    streamed: bool
    keep_usage: bool  # the client asked for the usage event itself
    offer: bytes = b""  # of a prefilled prompt: decode from its KV
    promise: Promise | None = None


class EngineError(SlacklineError):
    """The engine failed a call. `status` 0: no answer at all; `body` is what it said, JSON or not.

    `unreachable`: nothing listens there (connection refused or reset), as opposed to a slow or failing engine.
    """

    def __init__(self, message: str, *, status: int = 0, body: bytes = b"", unreachable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.unreachable = unreachable

    @property
    def client_fault(self) -> bool:
        """A 4xx other than overload: no other instance would answer differently."""
        return 400 <= self.status < 500 and self.status not in (408, 429)


class NotSupported(SlacklineError):
    """The adapter was asked for what its `capabilities` deny."""


class Backend(Protocol):
    """One serving engine. Every method may raise EngineError."""

    spec: InstanceSpec
    capabilities: Capabilities

    def generate(self, call: UpstreamCall) -> AsyncIterator[Chunk]:
        """First an `accepted` chunk, then data until `done`, or one body. Closing the iterator aborts the call."""
        ...

    async def prefill(self, call: UpstreamCall) -> Prefilled:
        """Compute the prompt and keep its KV for another engine."""
        ...

    async def abort(self, request_id: str) -> None: ...

    async def telemetry(self, now: float) -> Load:
        """The engine's own counts, stamped with the caller's monotonic `now`."""
        ...

    async def ready(self) -> bool: ...

    async def sleep(self, level: int = 1) -> None: ...

    async def wake(self) -> None: ...


BackendFactory = Callable[[InstanceSpec, aiohttp.ClientSession, Limits], Backend]
BACKENDS: Registry[BackendFactory] = Registry("backend")
