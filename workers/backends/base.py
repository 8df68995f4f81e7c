"""The contract between the gateway and its adapters to engines (`Backend`), and the value objects they exchange.

An adapter belongs to one instance. It never decides, never retries on another instance and keeps no request state
beyond the open response, so that the scheduler stays the only place that knows what runs where.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import aiohttp

from controller.core.errors import SlacklineError
from controller.core.kv_links import BorrowedKv, KvMoved, LinkReport
from controller.core.registry import Registry
from controller.core.types import LONGEST_ANSWER_S, InstanceSpec, Load, Role
from workers.backends.hints import Hints


@dataclass(frozen=True, slots=True)
class Limits:
    """Outbound time limits in seconds; every one explicit, none inherited from a library default."""

    connect_s: float = 2.0  # TCP connection to the engine
    headers_s: float = 60.0  # request sent to response headers, streamed calls
    between_chunks_s: float = 120.0  # longest silence inside a stream; a queued prompt counts here too
    total_s: float = (
        LONGEST_ANSWER_S  # one call from first byte out to last byte in; the only limit of a non-streamed call
    )
    telemetry_s: float = 1.0  # one read of /metrics or /health
    control_s: float = 60.0  # sleep and wake move gigabytes


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do beyond what all of them do, for gateway and console."""

    disaggregates: bool = False  # prefills for another engine, and decodes from KV that another one computed
    frees_kv: bool = False  # frees the KV it keeps for another engine when told to, not only after its lease
    links: bool = False  # keeps links to its peers and reports their state
    paired: bool = False  # both stages are sent at once and find each other (`meeting`)
    offers_early: bool = False  # offers the KV of a prompt when the last step of its prefill begins
    tells_pulling: bool = False  # a stream from another engine's KV says when that KV begins to come
    checkpoints: bool = False  # keeps the KV of an answer for branches, under a lease
    tells_landing: bool = False  # the headers of a whole answer come when the KV has arrived
    takes_bounds: bool = False  # its scheduler reads bounds of answers, also while they run


MOST_TOLD_TOKENS = 1 << 31  # no context is nearly as long


class Usage(NamedTuple):
    """Token counts as the engine itself reports them, each as `http.told_count` reads it."""

    prompt_tokens: int
    completion_tokens: int


class PrefillAnswer(NamedTuple):
    """A prompt was prefilled and its KV is kept. `offer`: where to pull it, as JSON that only an engine of the same
    kind reads; b"" where the engines find it by themselves. `done`: the first token was the last one. `borrowed`: how a
    prefix of it came from another engine."""

    offer: bytes
    done: bool
    borrowed: BorrowedKv | None = None


class RoleSwitch(NamedTuple):
    """An engine has the requested role. `already`: it had it before."""

    old: Role
    new: Role
    message: str = ""
    already: bool = False


ChunkKind = Literal["accepted", "data", "body"]


class AnswerChunk(NamedTuple):
    """One piece of an answer.

    `accepted`: headers came (no bytes). `data`: whole server-sent events to relay as they are; `tokens` of them deliver
    a token, maybe without text yet; `done` when `[DONE]` is among them. `body`: the complete answer of a call that is
    not streamed. `moved`: how the KV came, if the engine measures it; `pulling`: it has begun to come. `offer`: with
    `accepted`, where the KV of a prefill under way can be pulled. `reasoning`: of all
    tokens so far, those before the first one that is not reasoning. `borrowed`: how a prefix of its prompt came from
    another engine.
    """

    kind: ChunkKind
    raw: bytes = b""
    tokens: int = 0
    usage: Usage | None = None
    done: bool = False
    moved: KvMoved | None = None
    offer: bytes = b""
    pulling: bool = False
    reasoning: int = 0
    borrowed: BorrowedKv | None = None


class CallTargets(NamedTuple):
    """A request's targets, for engines whose own scheduler reads them: seconds from its arrival at the gateway, of
    which `waited_s` had passed when it was sent. Infinite: no target."""

    ttft_s: float
    tpot_s: float
    waited_s: float = 0.0
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class UpstreamCall:
    """One request as an engine gets it. `head` is the JSON body without its closing brace.

    The rank is known only when the scheduler sends, so the adapter appends its own fields and the brace: the parsed
    body need not be kept while the request is queued. The head of a streamed call asks for usage (`include_usage`).
    """

    request_id: str
    path: str  # "/v1/completions" or "/v1/chat/completions"
    head: bytes
    rank: int  # lower is more urgent
    streamed: bool
    keep_usage: bool  # the client asked for the usage event itself
    offer: bytes = b""  # of a prefilled prompt: decode from its KV; of a meeting: where both stages find each other
    targets: CallTargets | None = None
    salt: bytes = b""  # of its tenant: prefixes are shared in an engine's cache only within one
    checkpoint_s: float = 0.0  # how long its KV is to stay for branches
    branch_of: str = ""  # the request whose checkpoint it goes on from
    hints: Hints | None = None  # what else its engine's scheduler may read, as of now


WAITED_OUT = b'"reason":"waiting_time"'  # in the error of an engine that ended a request that had not begun


class EngineError(SlacklineError):
    """The engine failed a call. `status` 0: no answer at all; `body`: of the answer, JSON or not.

    `unreachable`: nothing listens there (connection refused or reset), unlike a slow or failing engine. `lost`: the
    connection had been made, and broke.
    """

    def __init__(
        self, message: str, *, status: int = 0, body: bytes = b"", unreachable: bool = False, lost: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.unreachable = unreachable
        self.lost = lost

    @property
    def connection(self) -> Literal["kept", "lost", "refused"]:
        return "lost" if self.lost else "refused" if self.unreachable else "kept"

    @property
    def waited_out(self) -> bool:
        """The request waited at the engine for longer than it may: nothing failed, and no other engine is tried."""
        return WAITED_OUT in self.body

    @property
    def client_fault(self) -> bool:
        """A 4xx other than overload: another instance would answer the same."""
        return 400 <= self.status < 500 and self.status not in (408, 429)


class NotSupported(SlacklineError):
    """The engine cannot do this, or was started without the option for it (`field`: that option's name)."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RoleRefused(SlacklineError):
    """The engine did not change its role. `reason` is machine-readable, `field` the engine's option at fault.

    `restorable`: it is as before and serves its old role; if not, it must be started again. `again`: a later try may
    succeed (it was busy, or the outcome of the call is not known).
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
    """The adapter to one engine. Every method may raise EngineError; what the engine cannot do raises NotSupported."""

    spec: InstanceSpec
    capabilities: Capabilities

    def generate(self, call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        """First an `accepted` chunk, then data until `done`, or one body.

        Closing the iterator, or cancelling the task that waits for it, ends the request at its engine, also one that
        the engine has only queued. Closing returns at once and raises nothing; whatever else the adapter must tell its
        engine follows in the background.
        """
        ...

    async def prefill(self, call: UpstreamCall, ending: Callable[[bytes], None] | None = None) -> PrefillAnswer:
        """Compute the prompt and keep its KV for another engine. With a meeting's offer: for the engine it names.

        `ending` is called with the offer when the last step begins, if the engine reports that (`offers_early`).
        """
        ...

    async def meeting(self) -> bytes:
        """For a paired engine that prefills: a new offer, which `prefill` here and `generate` elsewhere both carry."""
        ...

    async def free_kv(self, request_ids: Sequence[str]) -> None:
        """Free the KV that it keeps of these requests for another engine. Idempotent."""
        ...

    async def renew_kv(self, request_id: str, lease_s: float) -> bool:
        """The lease of the checkpoint that this request left begins again. False if it is not there any more."""
        ...

    async def tell_bounds(self, bounds: Mapping[str, tuple[int, int]]) -> None:
        """Lower and upper bounds in tokens, by id, of requests that may run there."""
        ...

    async def links(self) -> Sequence[LinkReport]:
        """Reports of the links over which it pulls KV."""
        ...

    async def telemetry(self, now: float) -> Load:
        """The engine's own counts, stamped with the caller's monotonic `now`."""
        ...

    async def ready(self) -> bool: ...

    async def role_settings(self) -> Mapping[str, Any]:
        """Settings that an engine needs from this one before it takes the same role."""
        ...

    async def role(self) -> Role:
        """The role it runs in now; where a role is routing alone, the configured one."""
        ...

    async def set_role(self, role: Role, settings: Mapping[str, Any] | None = None) -> RoleSwitch:
        """Must be idle. `settings`: of a peer in that role. Raises RoleRefused."""
        ...


class BackendFactory(Protocol):
    """An adapter's class, whose capabilities are known before there is an instance."""

    capabilities: Capabilities

    def __call__(self, spec: InstanceSpec, session: aiohttp.ClientSession, limits: Limits, /) -> Backend: ...


BACKENDS: Registry[BackendFactory] = Registry("backend")
