"""Earliest deadline first among the requests that can all be in time; behind them the others, by worth.

Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs", Management Science 15
(1968): go through the jobs in order of their deadlines and add up their work; whenever one would be late, defer the job
with the most work so far. What is left is in time, and no schedule has fewer late jobs (one machine, equal values).
Without overload nothing is deferred and the order is earliest deadline first; under overload the capacity goes to the
requests that take the least of it.

Deviations: a fleet has two resources, seconds of prefill and sequence slots, each taken to serve in order at the rate
that `Supply` predicts; a request is late if either lets it begin too late, and the work by which one is deferred is the
sum of its shares of both, by its value. An instance that is starting adds an equal part of both once it is likely to
serve, so that what it will keep is not deferred. Deferred requests are in order of apparent tardiness cost, take what
room is left, and are judged again in the next plan, so a wrong prediction defers nobody for good.

`trust` (0.65): share of the predicted rates that is counted on; 0.55, 0.75, 0.8 and 1 were tried (decision 153).
`margin_s` (0.05): least slack, about one decode step. `lookahead_s`: as in `apparent_tardiness_cost`. `coming` (on):
count instances that are starting (decision 319). Cost: O(1) per decision, O(n log n) per plan of n waiting requests,
O(log s) more for each of them with s instances that are starting.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.policy import ORDERINGS, Cost, Rank, Stateless, Supply
from controller.core.types import Request
from controller.policies.ordering.apparent_tardiness_cost import ApparentTardinessCost
from controller.policies.ordering.apparent_tardiness_cost import Config as TardinessConfig

LEAST_OWN = 0.1  # of a prompt's time alone, at least, is its own when it shares a step with others


@dataclass(frozen=True, slots=True)
class Config:
    trust: float = 0.65
    margin_s: float = 0.05
    lookahead_s: float = 10.0
    coming: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.trust <= 1:
            raise ConfigError("trust must lie in (0, 1]", field="trust")
        if not (math.isfinite(self.margin_s) and self.margin_s >= 0):
            raise ConfigError("margin_s must be a number of seconds, at least 0", field="margin_s")
        if not self.lookahead_s > 0:
            raise ConfigError("lookahead_s must be positive seconds", field="lookahead_s")


@ORDERINGS.register("feasible_deadlines")
class FeasibleDeadlines(Stateless):
    name: ClassVar[str] = "feasible_deadlines"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self._deferred = ApparentTardinessCost(TardinessConfig(self.config.lookahead_s))

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        return Rank((0.0, request.due - cost.prefill_s, request.arrival))

    def rank_deferred(self, request: Request, cost: Cost, now: float) -> Rank:
        rank = self._deferred.rank(request, cost, now)
        return Rank((1.0, *rank.key), rank.valid_until)

    def defer(self, waiting: Sequence[tuple[Request, Cost]], supply: Supply, now: float) -> set[str]:
        """Ids of requests that are served after the others, so that those are in time."""
        if not self.config.coming:
            supply = supply._replace(coming=())
        plan = _Plan(supply, self.config.trust, [_work(*each, supply) for each in waiting])
        out: set[str] = set()
        ahead: list[tuple[float, str, _Work]] = []
        for (request, cost), work in zip(waiting, plan.works, strict=True):
            latest_s = request.due - cost.prefill_s - cost.first_byte_s - self.config.margin_s - now
            if latest_s < 0 and request.workflow_left_s is not None:
                out.add(request.id)  # too late for its stage, not for its workflow: it is to push nobody out
                continue
            heapq.heappush(ahead, (-plan.share(work) / max(request.value, 1e-6), request.id, work))
            plan.add(work)
            begun = plan.begun_by(latest_s)
            while plan.begins_after(work, begun):
                _, name, most = heapq.heappop(ahead)
                out.add(name)
                plan.remove(most)
                if name == request.id:
                    break
        return out


_Work = tuple[float, float]  # seconds of prefill beside others, tokens of a slot


def _work(request: Request, cost: Cost, supply: Supply) -> _Work:
    """A prompt in a batch does not pay the batch's constant; a slot is also held while its prompt is computed."""
    prefill_s = max(LEAST_OWN * cost.prefill_s, cost.prefill_s - supply.prefill_constant_s)
    held = cost.prefill_s / supply.step_s if supply.step_s > 0 else 0.0
    return prefill_s, request.output_tokens + held


class _Plan:
    """The work of the requests that are served in time, in order of their deadlines."""

    def __init__(self, supply: Supply, trust: float, works: list[_Work]) -> None:
        self.works = works
        self._prefill_rate = max(trust * supply.prefill_rate, 1e-9)
        self._token_rate = trust * supply.token_rate
        self._prefill_s = supply.backlog_s
        # Free slots take as many average requests at once.
        mean = sum(tokens for _, tokens in works) / max(1, len(works))
        self._tokens = -supply.free_slots * mean
        instances = max(1, supply.instances)
        taken_at_once = mean * supply.slots / instances  # by one that begins to serve
        self._begins = (0.0, *supply.coming)
        self._prefilled = _Begun(self._prefill_rate, instances, self._begins, 0.0)
        self._sent = _Begun(self._token_rate, instances, self._begins, taken_at_once) if self._token_rate > 0 else None

    def share(self, work: _Work) -> float:
        """Seconds of the whole fleet."""
        return work[0] / self._prefill_rate + (work[1] / self._token_rate if self._token_rate > 0 else 0.0)

    def add(self, work: _Work) -> None:
        self._prefill_s += work[0]
        self._tokens += work[1]

    def remove(self, work: _Work) -> None:
        self._prefill_s -= work[0]
        self._tokens -= work[1]

    def begun_by(self, seconds: float) -> _Work:
        """The most work that can have begun after so many seconds."""
        piece = max(0, bisect_right(self._begins, seconds) - 1)
        sent = math.inf if self._sent is None else self._sent.by(seconds, piece)
        return self._prefilled.by(seconds, piece), sent

    def begins_after(self, last: _Work, begun: _Work) -> bool:
        """Whether more than `begun` comes before the last request in the plan, so that it begins later."""
        return self._prefill_s - last[0] > begun[0] or self._tokens - last[1] > begun[1]


class _Begun:
    """How much of one resource has begun by when, in pieces of one rate: by all instances together at `rate`, and by
    each that comes at its part of that, after what it takes `at_once`. In pieces, so that a request costs no more with
    many instances that are starting than with none."""

    def __init__(self, rate: float, instances: int, begins: tuple[float, ...], at_once: float) -> None:
        self._begins, self._rates, self._work = begins, [rate], [0.0]
        for since, until in pairwise(begins):
            self._work.append(self._work[-1] + self._rates[-1] * (until - since) + at_once)
            self._rates.append(self._rates[-1] + rate / instances)

    def by(self, seconds: float, piece: int) -> float:
        return self._work[piece] + self._rates[piece] * (seconds - self._begins[piece])
