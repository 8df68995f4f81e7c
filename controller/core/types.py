"""The basic types. Times are seconds on the driver's monotonic clock; lengths are tokens."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any, NamedTuple


class Targets(NamedTuple):
    """The targets that apply to one request, in seconds. None: not set."""

    ttft_s: float
    tpot_s: float
    deadline_s: float | None = None  # end to end, from arrival
    waiting_time_s: float = 5.0  # longest time until it is sent to an engine; then it ends with an error
    thinking_s: float | None = None  # first token that is not reasoning, from arrival; `ttft_s` follows from it then


LONGEST_ANSWER_S = 900.0  # of one call to an engine, from its first byte to its last
DEFAULT_MAX_NUM_SEQS = 32  # sequences at once, if neither the registration nor the engine tells

# Concord's API defaults (ch. 6), for requests that name neither targets nor a class.
CONCORD_DEFAULTS = Targets(ttft_s=5.0, tpot_s=0.2, deadline_s=None, waiting_time_s=5.0)


class Role(StrEnum):
    COLLOCATED = "collocated"
    PREFILL = "prefill"
    DECODE = "decode"


class Part(StrEnum):
    """Which stages of a request are sent to an instance."""

    WHOLE = "whole"
    PREFILL = "prefill"  # up to the first token; the KV is kept
    PAIR = "pair"  # the same, but both stages begin at once, when the decode instance is known


class Outcome(StrEnum):
    """How a request ended. Only OK can be attained.

    CANCELLED (by its client) is counted separately, and so is a request that the engine itself refused (REFUSED with
    ENGINE_REJECTED). All others are misses.
    """

    OK = "ok"
    REFUSED = "refused"  # answered 4xx/503 at once: infeasible, over quota, queue bound, no instance
    EXPIRED = "expired"  # waiting_time ran out in the queue
    FAILED = "failed"  # engine failed and no retry was possible
    CUT = "cut"  # engine died after the first token: the stream ended with an error event
    CANCELLED = "cancelled"  # client hung up


ENGINE_REJECTED = "engine_rejected"  # error code of a request that the engine refused with a 4xx
CLIENT_CLOSED = "client_closed"  # error code of a request that its client hung up on


def given_up(step_key: str, error_code: str) -> bool:
    """Whether its client hung up on a step of a workflow that it can ask for again by its key. A client that died and
    goes on has not failed its workflow by that."""
    return bool(step_key) and error_code == CLIENT_CLOSED


@dataclass(slots=True)
class Request:
    """What a dispatcher may know of a request. `output_tokens` is a prediction, never the true length."""

    id: str
    arrival: float
    targets: Targets
    prompt_tokens: int
    output_tokens: int  # expected output length (predictor), tokens
    model: str = ""
    tenant: str = ""
    slo_class: str = ""
    priority: int | None = None  # 0 is highest; None if the client gave none
    level: int | None = None  # its level in the priority mapping, if its targets came from there
    order: int = 0  # set by an operator: -1 goes first, 0 is unset, higher numbers go behind requests without one
    value: float = 1.0  # worth of attaining it, relative to others (SLOClass.value)
    may_defer: bool = False  # served late instead of refused if its targets cannot be met
    max_tokens: int | None = None
    workflow: str = ""
    stage: str = ""
    attempts: int = 0
    failed_on: tuple[str, ...] = ()  # instances that failed it, the latest last
    avoid: frozenset[str] = frozenset()  # prefill instances whose KV no decode instance could use
    ended: tuple[str, ...] = ()  # instances that died while it was there without a token: it is a suspect
    fingerprint: str = ""  # the same for the same request of the same tenant; "": not known
    least_tokens: int | None = None  # lower and upper bound of the answer (Concord 4.1); None: not known
    most_tokens: int | None = None
    workflow_left_s: float | None = None  # from its arrival until its workflow is due; its deadline is its step's
    whole_s: float | None = None  # its workflow's deadline: it is the first step, and refused if that cannot hold it
    shared_tokens: int = 0  # of its prompt, beside `prompt_tokens`: their KV is kept at the instance `shared_at`
    shared_at: str = ""

    def share_nothing(self) -> None:
        """All of its prompt is computed: it goes elsewhere than where the KV is kept, or failed there."""
        self.prompt_tokens += self.shared_tokens
        self.shared_tokens = 0

    @property
    def reserved_tokens(self) -> int:
        """Of KV for its answer: the upper bound, so that an answer seldom outgrows its room."""
        return self.output_tokens if self.most_tokens is None else self.most_tokens

    @property
    def surest_tokens(self) -> int:
        """Of its answer, where it may be given up because they take too long: the lower bound, since a request must not
        end for tokens that it may never have (decision 41)."""
        return self.output_tokens if self.least_tokens is None else self.least_tokens

    @property
    def judged(self) -> Request | None:
        """With the targets that an idle instance must be able to keep, or it is refused; None: it is served late. A
        step of a workflow is, unless the deadline of the whole workflow is too short for its first one alone."""
        if self.whole_s is None:
            return None if self.may_defer else self
        whole = Targets(self.whole_s, math.inf, self.whole_s, self.targets.waiting_time_s)
        return replace(self, targets=whole, whole_s=None)

    @property
    def due(self) -> float:
        """The earliest target time, on the driver's clock: of its first token or of its whole answer."""
        first, deadline_s = self.arrival + self.targets.ttft_s, self.targets.deadline_s
        return first if deadline_s is None else min(first, self.arrival + deadline_s)

    @property
    def ttft_due(self) -> float:
        return self.arrival + self.targets.ttft_s


class Load(NamedTuple):
    """An engine's telemetry: counts, never ids. `observed_at` is on the driver's clock."""

    observed_at: float
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    kv_capacity_tokens: int | None = None
    max_num_seqs: int | None = None
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    awake: bool = True
    cached_tokens_total: int = 0  # of the prompt tokens, found in the prefix cache


KEY_MADE = "*made"  # no name of a file


@dataclass(slots=True)
class InstanceSpec:
    """An instance as the dispatcher knows it. `key`: name of the key that its engine asks for, never the key itself;
    KEY_MADE: derived from the fleet's token; "": it asks for none."""

    id: str
    model: str
    url: str = ""
    backend: str = "vllm"
    role: Role = Role.COLLOCATED
    max_num_seqs: int | None = None  # None: not registered; the engine's own figure counts
    kv_capacity_tokens: int | None = None
    max_model_len: int = 4096  # most tokens of prompt and answer; longer requests go to other instances
    unit_cost: float = 1.0  # cost per instance-second
    latency: LatencyCoefficients | None = None
    labels: dict[str, str] = field(default_factory=dict)
    selects: bool = (
        False  # its engine chooses by value among all its requests, so the gateway should not hold any in its queue
    )
    # As a decode instance it sends the first token once the KV has arrived, also if all its slots are taken; others
    # send it after a decode step.
    first_token_with_kv: bool = False
    key: str = ""


class LatencyCoefficients(NamedTuple):
    """HyperFlexis eq. 1 and 2, in seconds. Prefill: a + b*sum(len) + c*sum(len^2); decode: a' + b'*sum(cur) + c'*B."""

    prefill_a: float
    prefill_b: float
    prefill_c: float
    decode_a: float
    decode_b: float
    decode_c: float


class Outlook(NamedTuple):
    """How one finished request is judged.

    `deadline_met` is also true if there is no deadline. `goodput_tokens`: output tokens delivered in time; with a
    deadline, all tokens of prompt and answer or none.
    """

    ttft_met: bool  # with a thinking deadline: that one
    tpot_met: bool
    deadline_met: bool
    attained: bool  # ttft, tpot and (if set) the deadline
    goodput_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """All about one request, as it is stored. Times of day are epoch seconds, durations seconds.

    `decisions` is compact: kind, reason and figures of each step. The fields are in the order of the COPY columns.
    """

    id: str  # x-slackline-request-id, unique
    arrived_at: float
    tenant: str
    slo_class: str
    model: str
    priority: int | None
    instance: str
    outcome: str  # an Outcome's value
    error_code: str
    http_status: int
    streamed: bool
    judged_by: str  # "tokens" (streamed) or "e2e" (non-streamed, TTFT + (n-1) x TPOT)
    prompt_tokens: int
    output_tokens: int
    target_ttft_s: float
    target_tpot_s: float
    target_deadline_s: float | None
    waiting_time_s: float | None
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    ttft_met: bool
    tpot_met: bool
    deadline_met: bool
    attained: bool
    goodput_tokens: int
    attempts: int
    workflow: str
    stage: str
    decisions: list[dict[str, Any]]
    token_times: list[float]  # seconds after arrival of the 1st, 2nd, 4th, 8th ... and last token
    prefill_instance: str = ""  # prefill instance, if `instance` only decoded it
    may_defer: bool = False  # its class serves it late instead of refusing it
    stands_for: int = (
        1  # requests; more than one: refusals of one second that are recorded as one, and this is a sample
    )
    last_arrived_at: float | None = None  # of those requests; `arrived_at` is of the first
    all_prompt_tokens: int | None = None  # of those requests; None: there is one
    # What the length of its answer was predicted from (`predict.length_bounds.FEATURES`), the lower and the upper bound
    # in tokens, and the version of the forest that these are from: empty and None without one.
    length_features: list[float] = field(default_factory=list)
    length_bounds: list[int] = field(default_factory=list)
    length_version: int | None = None
    # With a thinking deadline, `tpot_s` is of the tokens after the reasoning, and `ttft_met` says whether the first of
    # them (at `first_answer_s`) was in time. `reasoning_tokens`: before it, as its engine streamed them.
    target_thinking_s: float | None = None
    first_answer_s: float | None = None
    reasoning_tokens: int = 0
    # The step of its workflow as its client named it, and the names (step keys or request ids) of those that it depends
    # on; None: its client did not tell.
    step_key: str = ""
    parents: list[str] | None = None
    tool_steps: list[dict[str, Any]] = field(default_factory=list)  # reported since the request before
    refined_bounds: list[int] | None = None  # its tokens when bounds were predicted last, and these; None: never

    @property
    def counted_as(self) -> str:
        """The outcome for windows and roll-ups.

        A request that the engine refused counts like a cancelled one: it is no miss.
        """
        return Outcome.CANCELLED.value if self.error_code == ENGINE_REJECTED else self.outcome


RECORD_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(RequestRecord))


@dataclass(frozen=True, slots=True)
class WorkflowCancellation:
    """A workflow with a deadline was cancelled before it was due. Stored with the records: those of its requests do not
    tell if none was open. Epoch seconds."""

    tenant: str
    workflow: str
    by: str  # tenant or operator
    began_at: float
    due_at: float
    cancelled_at: float

    @property
    def id(self) -> str:
        """For the name of a file."""
        told = "\0".join((self.tenant, self.workflow, str(self.cancelled_at)))
        return f"cancelled-{blake2b(told.encode('utf-8', 'replace'), digest_size=12).hexdigest()}"


StoredRecord = RequestRecord | WorkflowCancellation


def record_as_dict(record: StoredRecord) -> dict[str, Any]:
    return asdict(record)


def record_from_dict(fields: dict[str, Any]) -> StoredRecord:
    """What `record_as_dict` made. Raises TypeError for anything else."""
    return WorkflowCancellation(**fields) if "cancelled_at" in fields else RequestRecord(**fields)
