"""Where the decode stage of a prefilled request runs: what the migrator asks. Registered by name, as policies are.

`tpot_budget` is HyperFlexis' Migrator (sec. 5.1, P/D: Alg. 1 on the decode stage, requests by TPOT, decisions at every
decode step). `least_outstanding` and `round_robin` are what P/D routers do today; `one_shot` chooses when the prefill
is sent, which HyperFlexis argues against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

from controller.core.errors import ConfigError
from controller.core.registry import Registry
from controller.core.types import Request
from controller.dispatch.shadow_state import Worker

Order = tuple[float, float, str]
NOBODY = 1e-9  # how far apart (seconds a token) an idle instance is from any TPOT: worse than equal, better than unlike


NOT_MEASURED: Mapping[str, float] = MappingProxyType({})


class Prefilled(NamedTuple):
    """A request whose first token came at `first_at`, with what it still wants of a decode instance. `move_s`: seconds
    its KV is expected to take to each instance, for placements that say `measures_links`."""

    request: Request
    first_at: float
    move_s: Mapping[str, float] = NOT_MEASURED

    def pace_s(self, now: float) -> float:
        """Seconds a token from now on so that the mean still keeps the TPOT; infinite for an answer of one token."""
        left = self.request.output_tokens - 1
        if left < 1:
            return math.inf
        return self.request.targets.tpot_s - (now - self.first_at) / left

    @property
    def kv_tokens(self) -> int:
        return self.request.prompt_tokens + self.request.output_tokens


class Choice(NamedTuple):
    """`binds`: its TPOT limits what else the instance may take; a hopeless request binds nobody."""

    worker: Worker
    reason: str
    binds: bool = True


class Placement(Protocol):
    name: ClassVar[str]
    one_shot: ClassVar[bool]  # chosen when the prefill is sent, kept whatever comes
    measures_links: ClassVar[bool]  # reads `move_s`

    def order(self, stage: Prefilled) -> Order:
        """Who is looked at first: smaller first."""
        ...

    def choose(self, stage: Prefilled, workers: Sequence[Worker], now: float) -> Choice | None:
        """One of `workers` (each has KV room for the prompt), or None: wait for an event or the next step."""
        ...

    def hopeless(self, stage: Prefilled, workers: Sequence[Worker], now: float) -> bool:
        """From now on it is placed only when no other waits."""
        ...


MIGRATIONS: Registry[type[Placement]] = Registry("migration")


def by_arrival(stage: Prefilled) -> Order:
    return (0.0, stage.request.arrival, stage.request.id)


def least_loaded(workers: Sequence[Worker]) -> Worker | None:
    return min(workers, key=lambda w: (w.outstanding / max(1, w.max_num_seqs), w.last_sent, w.id), default=None)


@MIGRATIONS.register("tpot_budget")
class TpotBudget:
    """HyperFlexis' Migrator: tightest TPOT first, to the earliest-maturing instance whose step stays under the TPOT.

    A request fits an instance if eq. 2 with it in the batch is at most `share` of the tightest TPOT there and of its
    own pace (its TPOT less what waiting has cost it so far), if a slot is free and if the KV of its prompt and expected
    answer fits. The maturity of a decode instance is the end of its next step, now + E_d (H6): the smallest E_d first.
    Eq. 2 is taken with the context that the batch has after `growth` of the answers still to come, 0.5 being the mean
    over their time here (0 is the paper's: what fits now no longer does when contexts have grown).
    The branch that Alg. 1 lacks: a request that could not keep its pace even alone is hopeless; once nobody waits who
    can still make it, it goes where eq. 2 with it harms nobody that is there, and binds nobody after it. Cost: linear
    in decode instances.
    """

    name: ClassVar[str] = "tpot_budget"
    one_shot: ClassVar[bool] = False
    measures_links: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True)
    class Config:
        share: float = 1.0
        growth: float = 0.5

        def __post_init__(self) -> None:
            if not 0 <= self.growth <= 1:
                raise ConfigError("growth must lie in [0, 1]", field="growth")
            if not 0 < self.share <= 1:
                raise ConfigError("share must lie in (0, 1]", field="share")

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def order(self, stage: Prefilled) -> Order:
        return (stage.request.targets.tpot_s, stage.request.arrival, stage.request.id)

    def choose(self, stage: Prefilled, workers: Sequence[Worker], now: float) -> Choice | None:
        request = stage.request
        hopeless = self.hopeless(stage, workers, now)
        for worker in self.rank(stage, workers):
            pace = self.config.share * stage.pace_s(now + stage.move_s.get(worker.id, 0.0))
            roomy = worker.free_slots > 0 and (stage.kv_tokens < worker.free_tokens() or not worker.outstanding)
            if not roomy:
                continue
            grown = self.config.growth * (worker.expected_tokens + request.output_tokens)
            step = worker.decode_with(request.prompt_tokens + 1 + round(grown))
            allowed = self.config.share * worker.tightest_tpot()
            if step <= min(allowed, pace):
                return Choice(worker, "fits_tpot")
            if hopeless and step <= allowed:
                return Choice(worker, "hopeless_harmless", binds=False)
        return None

    def hopeless(self, stage: Prefilled, workers: Sequence[Worker], now: float) -> bool:
        """Not even alone on an idle instance could it keep its pace."""
        pace, prompt = self.config.share * stage.pace_s(now), stage.request.prompt_tokens
        return all(worker.latency.decode(1, prompt) > pace for worker in workers)

    def rank(self, stage: Prefilled, workers: Sequence[Worker]) -> list[Worker]:
        """In which order instances are asked: the next step that ends first."""
        return sorted(workers, key=lambda w: (w.decode_s(), w.last_sent, w.id))


@MIGRATIONS.register("tpot_grouped")
class TpotGrouped(TpotBudget):
    """`tpot_budget` that looks first at who has the least time for its whole answer (TPOT x tokens after the first): by
    TPOT, as in the paper, a short answer waits behind long ones of a tighter pace although it has less. (By when it
    is due, the first token's time added, loses more in overload, as earliest deadline first does.) And it keeps like
    with like: asked first are instances whose tightest TPOT is the request's own, then idle ones, then the others by
    the difference, so that one tight request does not hold every instance to its pace. Ours; the same cost."""

    name: ClassVar[str] = "tpot_grouped"

    def order(self, stage: Prefilled) -> Order:
        request = stage.request
        return (request.targets.tpot_s * max(1, request.output_tokens - 1), request.arrival, request.id)

    def rank(self, stage: Prefilled, workers: Sequence[Worker]) -> list[Worker]:
        own = stage.request.targets.tpot_s

        def cost(worker: Worker) -> tuple[float, float, int, str]:
            kept = worker.tightest_tpot()
            apart = abs(kept - own) if math.isfinite(kept) else NOBODY
            return (apart, self.joins_s(stage, worker), worker.last_sent, worker.id)

        return sorted(workers, key=cost)

    def joins_s(self, stage: Prefilled, worker: Worker) -> float:
        """Seconds until it could take part in a step there."""
        return worker.decode_s()


@MIGRATIONS.register("tpot_linked")
class TpotLinked(TpotGrouped):
    """`tpot_grouped` that counts the way, for fleets whose links differ: among instances of like pace it asks first
    where the request joins a step the soonest, once the one that runs has ended and its KV has come over the link as
    measured; and its pace is what is left of it by then. A link that nobody measured is taken as the mean of those that
    somebody did. Ours; the same cost."""

    name: ClassVar[str] = "tpot_linked"
    measures_links: ClassVar[bool] = True

    def joins_s(self, stage: Prefilled, worker: Worker) -> float:
        return max(worker.decode_s(), stage.move_s.get(worker.id, 0.0))


@MIGRATIONS.register("least_outstanding")
class LeastOutstanding:
    """At once to the decode instance with the fewest unfinished requests for its slots, in order of arrival."""

    name: ClassVar[str] = "least_outstanding"
    one_shot: ClassVar[bool] = False
    measures_links: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True)
    class Config:
        """Nothing to set."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def order(self, stage: Prefilled) -> Order:
        return by_arrival(stage)

    def choose(self, stage: Prefilled, workers: Sequence[Worker], now: float) -> Choice | None:
        worker = least_loaded(workers)
        return None if worker is None else Choice(worker, "least_outstanding")

    def hopeless(self, stage: Prefilled, workers: Sequence[Worker], now: float) -> bool:
        return False


@MIGRATIONS.register("round_robin")
class RoundRobin:
    """At once to the decode instance whose last placement is longest ago, in order of arrival."""

    name: ClassVar[str] = "round_robin"
    one_shot: ClassVar[bool] = False
    measures_links: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True)
    class Config:
        """Nothing to set."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def order(self, stage: Prefilled) -> Order:
        return by_arrival(stage)

    def choose(self, stage: Prefilled, workers: Sequence[Worker], now: float) -> Choice | None:
        worker = min(workers, key=lambda w: (w.last_sent, w.id), default=None)
        return None if worker is None else Choice(worker, "round_robin")

    def hopeless(self, stage: Prefilled, workers: Sequence[Worker], now: float) -> bool:
        return False


@MIGRATIONS.register("one_shot")
class OneShot(LeastOutstanding):
    """Prefill and decode instance chosen together when the prefill is sent: the decode instance with the fewest
    unfinished requests then, those still in prefill counted. The request waits for that instance if it has no room."""

    name: ClassVar[str] = "one_shot"
    one_shot: ClassVar[bool] = True
