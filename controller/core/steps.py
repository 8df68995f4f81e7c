"""Events and actions of an engine's scheduler. Each batch of events has one `now` (monotonic seconds).

The scheduler composes steps; an executor runs them and reports back. Whether that executor uses tensors, a latency
profile or virtual time makes no difference here.
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
    ARRIVING = "arriving"  # its KV comes from another engine; blocks are reserved or filled, but it has no slot yet
    FINISHED = "finished"


class FinishReason(StrEnum):
    """vLLM's names: `stop` is an end-of-sequence token, a stop token or a stop string, `length` a token limit."""

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
    """One sequence. Fields above the blank line are set by the driver; those below belong to the scheduler.

    `token_ids` holds prompt and generated tokens, if the driver has them. A driver that only knows lengths leaves it
    None and may set `block_hashes` of the prompt instead (traces with prefix ids).
    """

    id: str
    arrival: float
    prompt_tokens: int
    max_tokens: int
    priority: int = 0  # lower is more urgent
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_tokens: frozenset[int] = frozenset()  # these end the sequence even with `ignore_eos`
    token_ids: MutableSequence[int] | None = None
    salt: bytes = b""  # cached prefixes are shared only between equal salts
    block_hashes: list[Hashable] = field(default_factory=list)
    seed: int = 0
    sampling: Sampling = GREEDY  # for executors with a real model
    due: float = math.inf  # first-token deadline, on the driver's clock
    ttft_s: float = math.inf  # seconds from the request's own arrival to `due`
    tpot_s: float = math.inf
    value: float = 1.0  # worth of attaining its targets, relative to other sequences
    tenant: str = ""  # the same for all sequences of one tenant; "": not known
    estimate: Estimate | None = None  # predicted length and worth, for policies that use them
    keep_kv: bool = False  # after the last token its blocks stay until Release, so that another engine can pull them
    checkpoint: str = ""  # its blocks stay under this name until Release, for branches; "": they are freed
    branch_of: str = ""  # the checkpoint that it goes on from, if that is here
    coming: ComingPrefix | None = None  # KV of its first tokens, which is copied here while the others are computed

    state: SeqState = SeqState.WAITING
    computed: int = 0  # tokens whose KV entries are in `blocks`
    output_tokens: int = 0
    swapped: int = 0  # tokens of it, while it waits, whose KV is in host memory
    back_s: float = 0.0  # seconds to copy that back, as measured
    cached: int = 0  # part of `computed` that came from the prefix cache at the last admission
    origin: Seq | None = None  # of a branch: the ended sequence whose blocks the checkpoint holds
    common: int = 0  # tokens that it has in common with its origin, from the start
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    finish: FinishReason | None = None
    stopped_by: int | None = None  # the token of `stop_tokens` that ended it
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


@dataclass(slots=True, eq=False)
class ComingPrefix:
    """A prefix that another engine sends while the prompt that it belongs to is computed. `seq` holds its blocks.

    `layers`: that are here. Only the scheduler writes it; executors read it, also on other threads. `lost`: no more
    layers come.
    """

    seq: Seq
    layers: int = 0
    lost: bool = False


class Chunk(NamedTuple):
    """Prefill tokens `start` to `start + length` of a sequence. `last`: the step samples a token for it."""

    seq: Seq
    start: int
    length: int
    last: bool


NEARLY_COMPUTED = 0.75  # share of a step that computes a whole prompt, after which its decode stage may be placed


class Swaps(NamedTuple):
    """Blocks that are copied between the KV cache and host memory: `out` from a KV block to a host block, then `back`
    from a host block to a KV block."""

    out: tuple[tuple[int, int], ...] = ()
    back: tuple[tuple[int, int], ...] = ()


NO_SWAPS = Swaps()


class Step(NamedTuple):
    """One iteration: chunks of prefill, and one token for each of `decodes`, whose lengths add up to `context_sum`.
    `copies`: KV blocks, from and to, that are copied before anything is computed; `swaps.out` comes before them, and
    `swaps.back` after them."""

    id: int
    chunks: tuple[Chunk, ...]
    decodes: tuple[Seq, ...]
    context_sum: int
    copies: tuple[tuple[int, int], ...] = ()
    swaps: Swaps = NO_SWAPS

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)


class Sampled(NamedTuple):
    """A token that the model produced. `eos`: it ended the sequence."""

    seq: Seq
    token: int
    eos: bool = False


# ---- events -------------------------------------------------------------------------------------------------------


class Added(NamedTuple):
    seq: Seq


class Reserve(NamedTuple):
    """Reserve blocks for all but the newest token of the sequence; the KV will come from another engine.

    Answered by Reserved, or by Reject("no_room") if there are too few. Landed or Aborted ends the reservation.
    `needed`: checkpoints that branches may still come for are dropped for it.
    """

    seq: Seq
    needed: bool = True


class Landed(NamedTuple):
    """All KV of a reserved sequence has arrived; it decodes as soon as there is a slot."""

    seq: Seq


class PrefixEnded(NamedTuple):
    """What another engine holds of a prefix has arrived: the first `tokens` tokens of a reserved sequence.

    Its full blocks stay in the prefix cache, its other blocks are free. This ends the reservation too.
    """

    seq: Seq
    tokens: int


class LayersCame(NamedTuple):
    """The first `layers` layers of a prefix are here, for schedulers that compute meanwhile (`overlaps_copies`)."""

    coming: ComingPrefix
    layers: int


class Lend(NamedTuple):
    """Give the sequence, which is never computed here, the blocks of its cached prefix until Release, so that another
    engine can copy them. `seq.computed` says how many tokens they have."""

    seq: Seq


class Release(NamedTuple):
    """Free the KV kept for an ended sequence (`keep_kv`, `checkpoint`). No effect if nothing is kept."""

    seq: Seq


class Aborted(NamedTuple):
    """The client hung up, or the driver found a stop string; `reason` says which."""

    seq: Seq
    reason: FinishReason = FinishReason.ABORT


class StepDone(NamedTuple):
    """The step ended. `seconds` is its time on the device, without the time while it was suspended. `out_s`, `back_s`:
    of them for its copies to host memory and back."""

    step_id: int
    sampled: Sequence[Sampled]
    seconds: float
    out_s: float = 0.0
    back_s: float = 0.0


class StepsDone(NamedTuple):
    """End of a step for drivers without tokens (virtual time): it ran `repeats` times.

    Each run gave one token to each of its decodes and of its last chunks. Sequences end only by `max_tokens`, with a
    Finish and no Emit. More than one repeat is a leap, bounded by EngineScheduler.repeats(); beyond that, blocks and
    ends would be wrong.
    """

    step_id: int
    repeats: int = 1
    seconds: float = 0.0  # sum over all repeats


class Suspended(NamedTuple):
    """The step stopped at the first boundary after a Suspend; the device is free.

    What it computed is kept, so that Resume continues to bit-identical tokens. `seconds`: time on the device so far,
    over all parts. A step that ended before it reached a boundary is answered by StepDone (StepsDone) instead, never by
    both.

    `layers` above 0: it stopped by itself before a layer whose KV of a coming prefix is not here, and needs so many.
    """

    step_id: int
    seconds: float
    layers: int = 0


class StepRan(NamedTuple):
    """What a batching policy observes after each step. Made by the scheduler; drivers never send it."""

    step: Step
    repeats: int
    seconds: float


class Paused(NamedTuple):
    """No step starts until Resumed.

    `release_kv`: running sequences free their blocks, and the prefix cache is cleared.
    """

    release_kv: bool = False


class Resumed(NamedTuple):
    pass


class CacheReset(NamedTuple):
    """Drop cached prefixes that no sequence uses."""


EngineEvent = (
    Added
    | Reserve
    | Landed
    | PrefixEnded
    | LayersCame
    | Lend
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


# Where a running step can be suspended. The end of a chunk is the end of its step. "none": nowhere.
Boundary = Literal["operator", "layer", "chunk", "none"]
BOUNDARIES: tuple[Boundary, ...] = ("operator", "layer", "chunk", "none")


class Suspend(NamedTuple):
    """Stop the running step at its next boundary (operator, layer or chunk, as the executor was built) and keep its
    state.

    Answered by Suspended, or by the step's end. No other step starts before the answer.
    """

    step_id: int


class Resume(NamedTuple):
    """Continue a suspended step where it stopped. The device is free."""

    step_id: int


class Discard(NamedTuple):
    """Drop a suspended step whose sequences are gone. No event answers it."""

    step_id: int


class Emit(NamedTuple):
    """A token for the client. `finish` is set on the last one."""

    seq: Seq
    token: int
    finish: FinishReason | None


class Finish(NamedTuple):
    """The sequence ended without a further token."""

    seq: Seq
    reason: FinishReason


class Reserved(NamedTuple):
    """Blocks are reserved. The first `seq.cached` tokens are in the prefix cache and need not be transferred."""

    seq: Seq


class Reject(NamedTuple):
    """The sequence was not queued. `code` is "queue_full", "too_long" or (for a Reserve) "no_room"."""

    seq: Seq
    code: str


EngineAction = Start | Suspend | Resume | Discard | Emit | Finish | Reserved | Reject


class EngineReply(NamedTuple):
    """Actions to perform. `wake_at`: call again then at the latest; None: only when there are events."""

    actions: list[EngineAction]
    wake_at: float | None = None


class Sink(Protocol):
    """Receives an executor's results, on the driver's thread and never during a call of the executor."""

    def __call__(self, event: StepDone | Suspended) -> None: ...


class Executor(Protocol):
    """Runs one step at a time; other steps may be suspended. Every call returns at once, and results go to the sink.

    Calls out of order (start while a step runs, resume of a step that is not suspended) raise RuntimeError.
    """

    def start(self, step: Step) -> None: ...

    def suspend(self, step_id: int) -> None:
        """Ask the running step to stop at its next boundary. No error if the step has just ended."""
        ...

    def resume(self, step_id: int) -> None: ...

    def discard(self, step_id: int) -> None:
        """Free the state of a suspended step."""
        ...

    def layers_done(self, step_id: int) -> int:
        """Layers that a running step has completed, so that its tokens' KV in these layers is written; 0 if there is no
        such step.
        """
        ...

    def close(self) -> None: ...
