"""The interfaces of policies. A policy has a frozen Config, one decision method on read-only views, and `observe`.

Learned state changes only in `observe(event, now)`; the decision method changes nothing. Ties are broken by arrival,
then id. Policies are registered by name beside their implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from controller.core.events import Event
from controller.core.registry import Registry
from controller.core.types import Request


class Cost(NamedTuple):
    """Predicted cost of one request, in engine seconds."""

    prefill_s: float  # alone on an idle engine
    service_s: float  # its share of an engine's time: prefill work and output_tokens marginal decode steps
    decode_step_s: float  # one decode step of it alone
    first_byte_s: float = 0.0  # from the end of its prefill to the client's first byte, where another instance decodes


class Rank(NamedTuple):
    """Sort key in the queue; smaller goes first.

    `valid_until`: the rank is computed again then (None: it never changes).
    """

    key: tuple[float, ...]
    valid_until: float | None = None


class AdmissionResult(NamedTuple):
    """Whether to send the request to this instance now, its probability of meeting the TTFT, and the reason if not."""

    admit: bool
    probability: float
    reason: str


class InstanceView(Protocol):
    """What policies may read of an instance's shadow state. It is not a copy, so policies must not change it."""

    id: str

    @property
    def outstanding(self) -> int: ...

    @property
    def waiting_tokens(self) -> int: ...

    @property
    def waiting_count(self) -> int: ...

    @property
    def running_count(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def mature_at(self) -> float: ...

    @property
    def last_sent(self) -> int: ...

    def utilisation(self) -> float: ...

    def first_token_error(self, request: Request) -> tuple[float, float]:
        """Mean and deviation of how much later than predicted first tokens of its kind came lately, seconds."""
        ...


class Policy(Protocol):
    name: ClassVar[str]

    def observe(self, event: Event, now: float) -> None: ...


class Ordering(Policy, Protocol):
    def rank(self, request: Request, cost: Cost, now: float) -> Rank: ...


class Supply(NamedTuple):
    """What the instances that serve a queue are predicted to begin. Rates are of all of them together."""

    prefill_rate: float  # seconds of prefill work per second, as far as running decodes leave time for it
    token_rate: float  # output tokens per second of all sequence slots; 0 where other instances decode
    backlog_s: float  # seconds of prefill work that were sent and have not ended
    free_slots: int
    step_s: float  # a decode step with all slots in use, mean of the instances
    prefill_constant_s: float  # of a prefill batch, whatever is in it
    instances: int = 1
    slots: int = 0  # of all sequences that decode there, free or not
    coming: tuple[float, ...] = ()  # seconds until each instance that is starting is likely to serve, ascending


class Planning(Protocol):
    """An ordering that also looks at the whole queue and defers requests, so that the others are in time (optional)."""

    def rank_deferred(self, request: Request, cost: Cost, now: float) -> Rank:
        """As `rank`, of a request that was deferred."""
        ...

    def defer(self, waiting: Sequence[tuple[Request, Cost]], supply: Supply, now: float) -> set[str]:
        """Ids of the deferred ones among `waiting`, which is in the order of `rank`."""
        ...


class Replica(NamedTuple):
    """An instance, for an ordering that ranks by instance. Times are seconds, as measured so far. Where other instances
    decode, those of a step are theirs, 0 until they are known."""

    id: str
    token_s: float  # a decode step beside what is there
    alone_s: float  # a decode step of one sequence, as fast as it may be for all that was measured
    prefill_b: float  # a prompt token (eq. 1): its linear and its quadratic part
    prefill_c: float
    crowd: float  # sequences that a prompt would delay; where others decode, that an instance's prompts keep decoding
    free_slots: int
    cached: Mapping[tuple[str, str], float] = MappingProxyType({})  # by tenant and class: part of prompts, of late


class Copy(NamedTuple):
    """What made a request be sent to an instance: it was in the frame's `window`, among the `rest`, or `late` on all
    instances. `goodput_rate`: its priority there, and on those of the `others` where it could still be in time."""

    tier: Literal["window", "rest", "late"]
    goodput_rate: float
    frame: int
    cutoff: float
    others: Mapping[str, float]


# By instances where they may not go as long as another takes them: requests among these, or among all that wait (None).
# A function, since most passes ask for a few of a long queue.
Barred = Callable[[Collection[str] | None], Mapping[frozenset[str], Collection[str]]]


def nowhere_barred(names: Collection[str] | None) -> Mapping[frozenset[str], Collection[str]]:
    """All may go everywhere."""
    return {}


class Frames(Protocol):
    """The order of one queue, by instance. Requests are known from `join` to `leave`."""

    @property
    def ends(self) -> float:
        """When what waits is to be ranked again, seconds; infinite while nothing waits."""
        ...

    def join(self, request: Request) -> None:
        """It waits; one that is known already stays where it is."""
        ...

    def leave(self, request_id: str) -> None: ...

    def due(self, instances: Collection[str], now: float) -> bool:
        """Whether `weigh` has something to do: the frame is over, or requests or instances are new."""
        ...

    def weigh(self, replicas: Sequence[Replica], now: float, barred: Barred = nowhere_barred) -> Collection[str]:
        """Rank what waits on each of these. `barred`: which may not go to which of them. Returns the requests whose
        `key` changed."""
        ...

    def key(self, request_id: str) -> tuple[float, ...] | None:
        """Its place in the queue, ahead of all that have none, as `Rank.key`."""
        ...

    def best(self, instances: Collection[str]) -> Collection[str]:
        """Those of `instances` on which the first request is worth about the most; empty: none is worth it anywhere."""
        ...

    def order(self, instance_id: str) -> Iterator[str]:
        """Requests in the order in which this instance takes them."""
        ...

    def sent(self, request_id: str, instance_id: str) -> Copy | None:
        """It is about to be sent there; what spoke for that, if these frames ranked it."""
        ...

    def state(self, now: float) -> dict[str, Any] | None:
        """What another process is to go on from, as JSON can hold it, with its settings; None before the first frame.
        Times are ages."""
        ...

    def restore(self, state: Mapping[str, Any], age_s: float, now: float) -> bool:
        """Go on from a state that is `age_s` seconds old. False, and nothing changes, if its settings were others.
        Raises KeyError, TypeError or ValueError for anything else than a state."""
        ...


class Framing(Protocol):
    """An ordering that ranks what waits again each frame and on each instance's own costs (optional)."""

    def frames(self) -> Frames:
        """The order of a new queue."""
        ...


class Admission(Policy, Protocol):
    def judge(
        self, request: Request, cost: Cost, instance: InstanceView, backlog_s: float, now: float
    ) -> AdmissionResult: ...

    def hopeless_at(self, request: Request, cost: Cost) -> float:
        """From this time on the request cannot meet its targets even alone on an idle engine."""
        ...


class Screening(Protocol):
    """An admission policy that also looks at the whole queue before each pass (optional)."""

    @property
    def refuses(self) -> bool:
        """Whether requests that it names are refused; otherwise they are served last."""
        ...

    def screen(
        self, waiting: Iterable[Request], prefill_s: Callable[[int], float], backlog_s: float, engines: int, now: float
    ) -> list[str]:
        """Ids of requests that cannot meet their TTFT.

        `waiting`: in order of service. `prefill_s`: seconds for a number of prompt tokens. `backlog_s`: seconds of
        prefill work that wait in the least loaded of the `engines` instances.
        """
        ...


class Routing(Policy, Protocol):
    def choose(self, instances: Sequence[InstanceView], now: float) -> InstanceView | None:
        """The best of `instances`, which all have free capacity (never empty); None to send nothing now."""
        ...


class Stateless:
    """Base of policies that learn nothing."""

    def observe(self, event: Event, now: float) -> None:
        """Nothing to learn."""


def learns(policy: Policy) -> bool:
    """Whether the policy needs events. There are thousands a second, and most policies learn nothing."""
    return getattr(type(policy), "observe", None) is not Stateless.observe


ORDERINGS: Registry[Callable[..., Any]] = Registry("ordering")
ADMISSIONS: Registry[Callable[..., Any]] = Registry("admission")
ROUTINGS: Registry[Callable[..., Any]] = Registry("routing")


def names(registry: Registry[Any]) -> Iterator[str]:
    return iter(registry)
