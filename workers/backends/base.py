"""What every engine adapter offers the gateway, and the value objects that cross that border.

An adapter belongs to one instance. It never decides, never retries on another instance and keeps no request state
beyond the open response, so that the dispatcher stays the only place that knows what runs where.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import aiohttp

from controller.core.errors import SlacklineError
from controller.core.kv_links import KvMoved, LinkReport
from controller.core.registry import Registry
from controller.core.types import InstanceSpec, Load, Role


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
    """What of an engine the gateway and the console go by, beyond what all of them do."""

    handover: bool = False  # prefills for another engine, and goes on from KV that another one computed
    frees_kv: bool = False  # gives up the KV it keeps for another engine when it is told to, not only by a lease
    links: bool = False  # keeps links to its peers and tells how they are
    paired: bool = False  # both stages of a handover are sent at once and find one another (`meeting`)
    offers_early: bool = False  # says where a prompt's KV waits when the last step of its prefill begins
    tells_pulling: bool = False  # a stream that goes on from another engine's KV says when that engine gives it out
    tells_landing: bool = False  # the headers of a whole answer come when the KV that it goes on from is there


class Usage(NamedTuple):
    """Token counts as the engine itself reports them."""

    prompt_tokens: int
    completion_tokens: int


class PrefillAnswer(NamedTuple):
    """A prompt's KV waits at the engine that computed it. `offer`: JSON that only another engine of its kind reads, b""
    where the engines find it by themselves. `done`: the first token was the last, nothing is left to decode."""

    offer: bytes
    done: bool


class RoleSwitch(NamedTuple):
    """An engine has the role it was asked for. `already`: it had it before."""

    old: Role
    new: Role
    message: str = ""
    already: bool = False


ChunkKind = Literal["accepted", "data", "body"]


class AnswerChunk(NamedTuple):
    """One piece of an answer.

    `accepted`: headers came (no bytes). `data`: whole server-sent events to relay as they are; `tokens` of them deliver
    a token, be it without text yet, `done` when `[DONE]` is among them. `body`: the complete answer of a non-streamed
    call. `moved`: how the KV came, where the engine says so; `pulling`: that it has begun to come.
    `offer`: with `accepted`, where the KV of a prefill under way waits.
    """

    kind: ChunkKind
    raw: bytes = b""
    tokens: int = 0
    usage: Usage | None = None
    done: bool = False
    moved: KvMoved | None = None
    offer: bytes = b""
    pulling: bool = False


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
    offer: bytes = b""  # of a prefilled prompt: decode from its KV; of a meeting: where both stages find one another
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
    """The adapter was asked for what its engine cannot do, or was not started for (`field`: the engine's own option
    that is missing)."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RoleRefused(SlacklineError):
    """The engine has not changed its role. `reason` is machine-readable, `field` the engine's option at fault.

    `restorable`: it is as before, requests of its old role may go there; if not, it must be started again. `again`: it
    may be asked once more later (it was busy, or nobody knows what became of the call).
    """

    def __init__(
        self, reason: str, message: str, *, field: str = "", restorable: bool = True, again: bool = False
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.restorable = restorable
        self.again = again


class Backend(Protocol):
    """One serving engine. Every method may raise EngineError; what its engine cannot do raises NotSupported."""

    spec: InstanceSpec
    capabilities: Capabilities

    def generate(self, call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        """First an `accepted` chunk, then data until `done`, or one body.

        Closing the iterator, or cancelling who waits for it, is how a request is ended at its engine: also one that the
        engine has only queued. It returns at once and raises nothing; what an adapter has to tell its engine besides
        follows by itself.
        """
        ...

    async def prefill(self, call: UpstreamCall, ending: Callable[[bytes], None] | None = None) -> PrefillAnswer:
        """Compute the prompt and keep its KV for another engine. With a meeting's offer: for the engine it names.

        `ending` is called with the offer when the last step begins, by engines that say so (`offers_early`).
        """
        ...

    async def meeting(self) -> bytes:
        """Of a paired engine that prefills: a new offer, which `prefill` here and `generate` elsewhere both carry."""
        ...

    async def free_kv(self, request_ids: Sequence[str]) -> None:
        """What it keeps of these requests for another engine is not wanted. Harmless where it keeps nothing."""
        ...

    async def links(self) -> Sequence[LinkReport]:
        """Of the links over which it pulls KV."""
        ...

    async def telemetry(self, now: float) -> Load:
        """The engine's own counts, stamped with the caller's monotonic `now`."""
        ...

    async def ready(self) -> bool: ...

    async def role_settings(self) -> Mapping[str, Any]:
        """What an engine that is to take this one's role must be told of it."""
        ...

    async def role(self) -> Role:
        """That it runs in now; where a role is mere routing, the one it was given."""
        ...

    async def set_role(self, role: Role, settings: Mapping[str, Any] | None = None) -> RoleSwitch:
        """Nothing may run there. `settings`: of a peer in that role. Raises RoleRefused."""
        ...


class BackendFactory(Protocol):
    """An adapter's class: what its engines can do is known before there is one."""

    capabilities: Capabilities

    def __call__(self, spec: InstanceSpec, session: aiohttp.ClientSession, limits: Limits, /) -> Backend: ...


BACKENDS: Registry[BackendFactory] = Registry("backend")
