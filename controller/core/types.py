"""The nouns of the system. All times are seconds of one monotonic clock given by the driver; lengths are tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Targets(NamedTuple):
    """What one request was promised, as applied. Seconds; None means "not promised"."""

    ttft_s: float
    tpot_s: float
    deadline_s: float | None = None  # end to end, from arrival
    waiting_time_s: float = 5.0  # dropped with an error if not sent to an engine by then


DEFAULT_MAX_NUM_SEQS = 32  # sequences at once of an endpoint of which neither its registration nor itself says how many

# Concord ch. 6's API defaults, used when a request names neither targets nor a class.
CONCORD_DEFAULTS = Targets(ttft_s=5.0, tpot_s=0.2, deadline_s=None, waiting_time_s=5.0)


class Role(StrEnum):
    COLLOCATED = "collocated"
    PREFILL = "prefill"
    DECODE = "decode"


class Part(StrEnum):
    """What of a request an instance is sent."""

    WHOLE = "whole"
    PREFILL = "prefill"  # up to its first token; the KV is kept
    PAIR = "pair"  # the same, begun when its decode instance is known, both at once


class Outcome(StrEnum):
    """How a request ended. Only OK can be attained. CANCELLED (by its client) is counted apart, and so is what the
    engine itself refused (REFUSED with records.ENGINE_REJECTED); the rest are misses."""

    OK = "ok"
    REFUSED = "refused"  # answered 4xx/503 at once: infeasible, over quota, queue bound, no instance
    EXPIRED = "expired"  # waiting_time ran out in the queue
    FAILED = "failed"  # engine failed and no retry was possible
    CUT = "cut"  # engine died after the first token: the stream ended with an error event
    CANCELLED = "cancelled"  # client hung up


@dataclass(slots=True)
class Request:
    """What a dispatcher may know of a request. `output_tokens` is an estimate, never the truth."""

    id: str
    arrival: float
    targets: Targets
    prompt_tokens: int
    output_tokens: int  # expected output length (predictor), tokens
    model: str = ""
    tenant: str = ""
    slo_class: str = ""
    priority: int | None = None  # 0 is highest; None where the client named none
    level: int | None = None  # its level in the priority mapping, where its targets came from there
    order: int = 0  # an operator's word, for as long as it lives: -1 before all, 0 none, more behind those without one
    value: float = 1.0  # goodput of meeting this request, relative to others (SLOClass.value)
    may_defer: bool = False  # served late rather than refused when its targets cannot be met
    max_tokens: int | None = None
    workflow: str = ""
    stage: str = ""
    attempts: int = 0
    failed_on: tuple[str, ...] = ()  # instances that failed it, the last one last
    avoid: frozenset[str] = frozenset()  # prefill instances from where its KV got nowhere

    @property
    def ttft_due(self) -> float:
        return self.arrival + self.targets.ttft_s


class Load(NamedTuple):
    """What an engine reports (telemetry). Counts, never ids; `observed_at` is on the driver's clock."""

    observed_at: float
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    kv_capacity_tokens: int | None = None
    max_num_seqs: int | None = None
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    awake: bool = True


@dataclass(slots=True)
class InstanceSpec:
    """A serving engine as the dispatcher knows it."""

    id: str
    model: str
    url: str = ""
    backend: str = "vllm"
    role: Role = Role.COLLOCATED
    max_num_seqs: int | None = None  # None: nobody said, and what the engine says of itself counts
    kv_capacity_tokens: int | None = None
    max_model_len: int = 4096  # tokens of prompt and answer: who asks for more is sent to a longer one
    unit_cost: float = 1.0  # cost of one instance-second
    latency: LatencyCoefficients | None = None
    labels: dict[str, str] = field(default_factory=dict)
    selects: bool = False  # its engine chooses by value among all that it was sent: work held back is hidden from it


class LatencyCoefficients(NamedTuple):
    """HyperFlexis eq. 1, 2, in seconds. Prefill: a + b*sum(len) + c*sum(len^2); decode: a' + b'*sum(cur) + c'*B."""

    prefill_a: float
    prefill_b: float
    prefill_c: float
    decode_a: float
    decode_b: float
    decode_c: float


class Outlook(NamedTuple):
    """How one finished request is judged. `deadline_met` also where none was promised; `goodput_tokens`: output tokens
    that came in time, or under a deadline all of prompt and answer or none."""

    ttft_met: bool
    tpot_met: bool
    deadline_met: bool
    attained: bool  # ttft and tpot (and the deadline where one was promised)
    goodput_tokens: int
