"""What an engine's scheduler is told and what it answers. One batch of events, one `now` (monotonic seconds).

The scheduler composes steps; an executor runs them and reports back. Nothing here knows whether tensors, a latency
profile or virtual time stand behind a step.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from controller.core.estimates import Estimate


class SeqState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ARRIVING = "arriving"  # its KV comes from another engine: blocks are reserved or filled, it has no slot yet
    FINISHED = "finished"


class FinishReason(StrEnum):
    """vLLM's names: `stop` is an end-of-sequence token, a stop token or a stop string, `length` a bound on tokens."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Sampling(NamedTuple):
    """How a model's next token is drawn. `temperature` 0 is greedy; `top_k` 0 keeps the whole vocabulary."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Sampling()


@dataclass(slots=True, eq=False)
class Seq:
    """One generation. The first block is what the driver says, the second belongs to the scheduler (read-only outside).

    `token_ids` holds prompt and generated tokens where the driver has them; a driver that only knows lengths leaves it
    None and may give `block_hashes` of the prompt instead (traces with prefix ids).
    """

    id: str
    arrival: float
    prompt_tokens: int
    max_tokens: int
    priority: int = 0  # lower is more urgent
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_tokens: frozenset[int] = frozenset()  # end it too, `ignore_eos` or not
    token_ids: MutableSequence[int] | None = None
    salt: bytes = b""  # prefixes are shared only between equal salts
    block_hashes: list[Hashable] = field(default_factory=list)
    seed: int = 0
    sampling: Sampling = GREEDY  # for executors with a real model
    due: float = math.inf  # first token promised by then, on the driver's clock
    ttft_s: float = math.inf  # what `due` leaves from the request's own arrival
    tpot_s: float = math.inf
    value: float = 1.0  # goodput of meeting the promises, relative to others
    estimate: Estimate | None = None  # of length and worth, for policies that use them
    keep_kv: bool = False  # when its last token is out, its blocks stay until Release: another engine takes them over

    state: SeqState = SeqState.WAITING
    computed: int = 0  # tokens whose KV entries are in `blocks`
    output_tokens: int = 0
    cached: int = 0  # of `computed`, taken from the prefix cache at the last admission
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    finish: FinishReason | None = None
    stopped_by: int | None = None  # of `stop_tokens`, the one that ended it
    scheduled_at: float | None = None  # first time in a step
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 while decoding, more in (re)prefill."""
        return self.prompt_tokens + self.output_tokens - self.computed

    @property
    def decoding(self) -> bool:
        return self.output_tokens > 0 and self.prompt_tokens + self.output_tokens - self.computed == 1


class Chunk(NamedTuple):
    """Prefill tokens `start` to `start + length` of a sequence. `last`: the step samples a token for it."""

    seq: Seq
    start: int
    length: int
    last: bool


NEARLY_COMPUTED = 0.75  # of a step that computes a whole prompt: from then on its decode stage may be placed


class Step(NamedTuple):
    """One iteration: prefill chunks and one token for each of `decodes`, whose lengths add up to `context_sum`."""

    id: int
    chunks: tuple[Chunk, ...]
    decodes: tuple[Seq, ...]
    context_sum: int

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)


class Sampled(NamedTuple):
    """`eos`: the model ended the sequence with this token."""

    seq: Seq
    token: int
    eos: bool = False


# ---- events -------------------------------------------------------------------------------------------------------


class Added(NamedTuple):
    seq: Seq


class Reserve(NamedTuple):
    """KV for all but the newest token of the sequence will come from another engine: take blocks for it. Answered by
    Reserved, or by Reject("no_room") where there are none now. Landed or Aborted ends the reservation."""

    seq: Seq


class Landed(NamedTuple):
    """The KV of a reserved sequence is here whole: it decodes as soon as it finds a slot."""

    seq: Seq


class Release(NamedTuple):
    """The KV of an ended sequence (`keep_kv`) is no longer needed. Without effect if nothing is kept for it."""

    seq: Seq


class Aborted(NamedTuple):
    """The client hung up, or a stop string was seen downstream: `reason` says which."""

    seq: Seq
    reason: FinishReason = FinishReason.ABORT


class StepDone(NamedTuple):
    """`seconds` is what the step took on the device, without the time it was suspended."""

    step_id: int
    sampled: Sequence[Sampled]
    seconds: float


class StepsDone(NamedTuple):
    """For drivers without tokens (virtual time): the step ran `repeats` times and each time gave one token to each of
    its decodes and of its last chunks. Sequences end by `max_tokens` alone and are answered with Finish, not Emit.

    More than one repeat is a leap: at most EngineScheduler.repeats(), or the blocks and ends would not match.
    """

    step_id: int
    repeats: int = 1
    seconds: float = 0.0  # of all repeats together


class Suspended(NamedTuple):
    """The step stopped at the boundary after the Suspend; the device is free. What it has computed is kept, so that
    Resume goes on to bit-identical tokens. `seconds`: what it has taken on the device so far, all parts together.

    A step that ended before it met a boundary answers with its StepDone (StepsDone) instead, never with both.
    """

    step_id: int
    seconds: float


class StepRan(NamedTuple):
    """What a batching policy observes after each step: what ran, and how long it took. Drivers never send it."""

    step: Step
    repeats: int
    seconds: float


class Paused(NamedTuple):
    """No step starts until Resumed. `release_kv`: running sequences give their blocks back and the cache is dropped."""

    release_kv: bool = False


class Resumed(NamedTuple):
    pass


class CacheReset(NamedTuple):
    """Forget cached prefixes that nothing uses."""


EngineEvent = (
    Added
    | Reserve
    | Landed
    | Release
    | Aborted
    | StepDone
    | StepsDone
    | Suspended
    | StepRan
    | Paused
    | Resumed
    | CacheReset
)

# ---- actions ------------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    step: Step


# Where a running step can be suspended. A chunk's end is the end of its step; "none": nowhere.
Boundary = Literal["operator", "layer", "chunk", "none"]
BOUNDARIES: tuple[Boundary, ...] = ("operator", "layer", "chunk", "none")


class Suspend(NamedTuple):
    """Stop the running step at its next boundary (operator, layer or chunk, as the executor was built) and keep its
    state. Answered by Suspended, or by the step's end; nothing else is started before the answer."""

    step_id: int


class Resume(NamedTuple):
    """Continue a suspended step where it stopped. The device is free."""

    step_id: int


class Discard(NamedTuple):
    """Forget a suspended step: its sequences are gone. No event answers."""

    step_id: int


class Emit(NamedTuple):
    """A token for the client. `finish` is set on the last one."""

    seq: Seq
    token: int
    finish: FinishReason | None


class Finish(NamedTuple):
    """The sequence ended without another token."""

    seq: Seq
    reason: FinishReason


class Reserved(NamedTuple):
    """Blocks are held; `seq.cached` tokens of it are in the prefix cache here and need not be sent."""

    seq: Seq


class Reject(NamedTuple):
    """Never queued. `code` is "queue_full", "too_long" or (of a Reserve) "no_room"."""

    seq: Seq
    code: str


EngineAction = Start | Suspend | Resume | Discard | Emit | Finish | Reserved | Reject


class EngineReply(NamedTuple):
    """`wake_at`: ask again then, at the latest; None: only on an event."""

    actions: list[EngineAction]
    wake_at: float | None = None


class Sink(Protocol):
    """Where an executor's results go: on the driver's thread, never from inside a call of the executor."""

    def __call__(self, event: StepDone | Suspended) -> None: ...


class Executor(Protocol):
    """Runs one step at a time; others may lie suspended. Every call returns at once, results arrive through the sink.

    Calls out of order (a start while a step runs, a resume of what was not suspended) raise RuntimeError.
    """

    def start(self, step: Step) -> None: ...

    def suspend(self, step_id: int) -> None:
        """Ask the running step to stop at its next boundary. A step that has just ended is no error."""
        ...

    def resume(self, step_id: int) -> None: ...

    def discard(self, step_id: int) -> None:
        """Free what a suspended step keeps."""
        ...

    def layers_done(self, step_id: int) -> int:
        """Layers that a step under way has passed, so that its tokens' KV entries in them are written; 0 for others."""
        ...

    def close(self) -> None: ...
