"""Lanes: the queue, recent traffic and instances of one served model, and what serving a request there would cost.

Requests of one model never compete with those of another, so a dispatcher keeps a `Lane` for each (`Fleet`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from controller.core import events as ev
from controller.core.decisions import Alternative, Decision, Figure
from controller.core.policy import Cost, Replica, Screening
from controller.core.types import InstanceSpec, Request, Role
from controller.dispatch.queue import Entry, RequestQueue
from controller.dispatch.shadow_state import Roster, ShadowInstance
from controller.dispatch.sole_keepers import Keepers
from controller.dispatch.supply import supply_of

REFRESH_S = 0.5  # how old the tightest target of recent traffic may be
NO_INSTANCE_RETRY_S = 5.0  # when a client may try again: about as long as starting an instance takes
MOST_NAMED = 8  # a record names at most this many instances
TPOT_MARGIN = 1.5  # a single decode step this much slower than the target cannot be an error of the prediction
REFERENCE_TOKENS = 1_000  # prompt and context by which costs are compared over time
REFERENCE_ANSWER = 100  # tokens of an answer, where instances are compared
SAME_COST = 1.05  # instances of one kind differ by this much once each has learned from its own traffic
SAME_SHARE = 0.1  # cached parts of prompts that differ by less say nothing: they are learned by kind of request
JUDGE_AGAIN = 0.1  # a change of the reference costs by this part changes what is hopeless
RECOSTED_EACH_PASS = 100  # waiting requests whose costs are predicted again in one pass: about a millisecond
TOLD_EACH_PASS = 100  # waiting requests that frames are told of in one pass: one or two milliseconds
GO_ON_S = 0.002  # until the next of either, if no event starts a pass before
SHORT_START_S = 4.0  # a plan is made again before what such a start will keep is too late (decision 319)
SAME_START_S = 1.0  # that a gateway's two clocks may drift apart while an instance starts
PLANNED_EACH_PASS = 64  # waiting requests of which a plan is cheap enough for every pass
PLAN_AGAIN_S = 1e-4  # for each request beyond them, until the next plan: some 3 % of the gateway's time
GUESS = ShadowInstance(InstanceSpec("", ""))  # of a model that has no instance yet


def refuse(
    request: Request, code: str, reason: str, retry_after_s: float, now: float, figures: dict[str, Figure]
) -> ev.Refuse:
    return ev.Refuse(request, code, retry_after_s, Decision("refuse", reason, request.id, now, figures))


class RecentTargets:
    """Targets of the last `window_s` seconds, TTFT or TPOT: what may arrive next (our reading of the "tightest TTFT" of
    eq. 5).

    `tightest` is their `share` quantile: 0 is the minimum; a few percent keep one odd request from shrinking the whole
    fleet's budget.
    """

    def __init__(self, window_s: float, share: float, limit: int = 2_000) -> None:
        self._window_s = window_s
        self._share = share
        self._limit = limit
        self._seen: deque[tuple[float, float]] = deque()
        self._counts: Counter[float] = Counter()
        self._tightest: float | None = None
        self._fresh_until = 0.0

    def add(self, target_s: float, now: float) -> None:
        self._seen.append((now, target_s))
        self._counts[target_s] += 1
        if self._tightest is None or target_s < self._tightest:
            self._fresh_until = now  # recompute: it may be the new tightest
        if len(self._seen) > self._limit:
            self._forget()

    def tightest(self, now: float, default: float) -> float:
        """Seconds; `default` where there was no traffic."""
        if now < self._fresh_until and self._tightest is not None:
            return self._tightest
        while self._seen and self._seen[0][0] < now - self._window_s:
            self._forget()
        self._fresh_until = now + REFRESH_S
        self._tightest = self._quantile()
        return default if self._tightest is None else self._tightest

    def _quantile(self) -> float | None:
        if not self._seen:
            return None
        wanted = self._share * len(self._seen)
        seen = 0
        ordered = sorted(self._counts)
        for target in ordered:
            seen += self._counts[target]
            if seen > wanted:
                return target
        return ordered[-1]

    def _forget(self) -> None:
        _, target = self._seen.popleft()
        self._counts[target] -= 1
        if not self._counts[target]:
            del self._counts[target]


class DecodeStep(NamedTuple):
    """`seconds`: a decode step there beside one more sequence."""

    instance: ShadowInstance
    outstanding: int
    seconds: float


class Lane:
    """One model's part of the dispatcher's state. `traffic`, `paces`: recent TTFT and TPOT targets; `keepers`: what
    recent requests need. `screening`: the admission, if it looks at the whole queue."""

    def __init__(
        self,
        queue: RequestQueue,
        traffic: RecentTargets,
        paces: RecentTargets,
        keepers: Keepers,
        screening: Screening | None = None,
    ) -> None:
        self.queue = queue
        self._screening = screening
        self.traffic = traffic
        self.paces = paces
        self.keepers = keepers
        self._steps: list[DecodeStep] | None = None  # see `steps`
        self.instances: dict[str, ShadowInstance] = {}
        self._longest: int | None = None  # longest context, once a pass needed it
        self._next: list[ShadowInstance] = []  # see `best`
        self._best: list[ShadowInstance] = []
        self._best_at = -1
        self._costed: tuple[float, float] | None = None  # reference costs by which the queue was judged last
        self._plan_at = -math.inf  # when the ordering may plan again
        self._kept_free: tuple[str, str] | None = None  # a suspect that waits, and the instance that gets no others
        self.again_at = math.inf  # when a request that could go now has waited for a better instance (`Pacing`)
        self.expected_at = math.inf  # when an instance that is being started may be up; infinite: none is
        self._serving_at: tuple[float, ...] = ()  # when those of which that is predicted are likely to serve

    @property
    def attended(self) -> bool:
        """Whether an instance takes requests or will once it wakes. A draining one will not."""
        return any(instance.state != "draining" for instance in self.instances.values())

    def join(self, instance: ShadowInstance) -> None:
        """A new instance, or new settings of a known one."""
        self.instances[instance.id] = instance
        self.keepers.joined(instance.id)
        self._best_at = -1

    def leave(self, instance: ShadowInstance) -> None:
        self.instances.pop(instance.id, None)
        self.keepers.left(instance)
        self._best_at = -1

    def advance(self, now: float) -> None:
        """Passes begin. Until they end no event changes an instance, so the longest context is computed once."""
        self._longest = self._steps = None
        self.again_at = math.inf
        reference = self._reference_cost()
        if reference is not None and (self._costed is None or _differs(reference, self._costed)):
            self._costed = reference
            self.queue.outdate()
        if self.queue.outdated:
            self.queue.recost(self.cost, now, RECOSTED_EACH_PASS)
        self.queue.tell(TOLD_EACH_PASS)
        self.queue.advance(now)
        # One that waits alone is next, whatever a plan says of it.
        if self.queue.planning is not None and now >= self._plan_at and len(self.queue.ready) > 1:
            able = [instance for instance in self.instances.values() if instance.takes]
            if able and not any(guessed(instance) for instance in able):
                self._plan_at = now + PLAN_AGAIN_S * max(0, len(self.queue.ready) - PLANNED_EACH_PASS)
                self.queue.plan(supply_of(able, now, self._serving_at), now)

    def preferred(self, able: list[ShadowInstance], now: float) -> list[ShadowInstance]:
        """Those of `able` to choose among: all, unless the ordering ranks by instance. What has no rank there, as what
        an operator moved, may go to any."""
        frames = self.queue.frames
        if frames is None or not able:
            return able
        taking = [instance for instance in self.instances.values() if instance.takes]
        if frames.due([instance.id for instance in taking], now):
            self.queue.weigh([replica_of(instance) for instance in taking], now, partial(self._barred, taking))
        best = frames.best({instance.id for instance in able})
        return [instance for instance in able if instance.id in best] or able

    def _barred(self, taking: list[ShadowInstance], names: Collection[str] | None) -> dict[frozenset[str], list[str]]:
        """By instances where they may not go as long as another takes them (see `may_go`): requests among these, or
        among all that wait. Instances are looked at once for all requests that fit into the same ones."""
        lengths = sorted({each.spec.max_model_len for each in taking})
        entries: Iterable[Entry | None]
        entries = self.queue.selective(lengths[0]) if names is None else map(self.queue.get, names)
        by_length: dict[tuple[int, int], frozenset[str]] = {}
        found: dict[frozenset[str], list[str]] = {}
        for entry in entries:
            if entry is None:
                continue
            if entry.excluded or entry.request.avoid:
                where = self._barred_for(entry, taking)
            else:  # both needs: an instance that only prefills holds no answer
                needs = bisect_left(lengths, entry.context), bisect_left(lengths, entry.request.prompt_tokens + 1)
                known = by_length.get(needs)
                where = by_length[needs] = self._barred_for(entry, taking) if known is None else known
            if where:
                found.setdefault(where, []).append(entry.request.id)
        return found

    def _barred_for(self, entry: Entry, taking: list[ShadowInstance]) -> frozenset[str]:
        able = [each for each in taking if self._long_enough(entry.request, each)]
        for excluded in (entry.excluded, entry.request.avoid):
            able = [each for each in able if each.id not in excluded] or able
        return frozenset(each.id for each in taking).difference(each.id for each in able)

    def unserved(self, request: Request, now: float) -> ev.Refuse | None:
        """A refusal if there is no instance, and none that is being started can be up while the request may wait."""
        if self.attended:
            return None
        if math.isinf(self.expected_at):
            return refuse(request, "no_capacity", "no_instance", NO_INSTANCE_RETRY_S, now, {})
        waiting_s = min(request.targets.waiting_time_s, request.targets.deadline_s or math.inf)
        if request.arrival + waiting_s > max(now, self.expected_at):
            return None
        starts_in_s = max(0.0, self.expected_at - now)
        figures: dict[str, Figure] = {"starts_in_s": starts_in_s, "waiting_s": waiting_s}
        return refuse(request, "no_capacity", "starts_too_late", max(1.0, starts_in_s), now, figures)

    def expect(self, expected: ev.Expected, now: float) -> list[ev.Refuse]:
        """When instances are expected; once none is, the requests that waited for one are refused."""
        given_up = math.isinf(expected.at) and not math.isinf(self.expected_at) and not self.attended
        known = self._serving_at  # a start that was long when it began is counted to its end
        self.expected_at = expected.at
        self._serving_at = tuple(
            at
            for at in expected.serving
            if at > now + SHORT_START_S or any(abs(at - other) < SAME_START_S for other in known)
        )
        waiting = [entry.request for entry in self.queue.entries()] if given_up else []
        for request in waiting:
            self.queue.remove(request.id)
        return [
            refuse(request, "no_capacity", "no_instance", NO_INSTANCE_RETRY_S, now, {"waited_s": now - request.arrival})
            for request in waiting
        ]

    def expire(self, now: float, *, late: bool) -> list[ev.Drop]:
        """Drop those whose waiting time is over. `late`: only those for which it ended before `now`."""
        expired = self.queue.expire(now, late=late)
        if not expired:
            return []
        able = [instance for instance in self.instances.values() if instance.takes]
        busy = {each.id: each.occupancy() for each in able} if len(able) <= MOST_NAMED else {}
        fleet: dict[str, Figure] = {
            "instances": len(able),
            "outstanding": sum(instance.outstanding for instance in able),
            "queued": len(self.queue),
        }
        return [self._drop(entry, fleet, busy, now) for entry in expired]

    def _drop(self, entry: Entry, fleet: dict[str, Figure], busy: Mapping[str, Alternative], now: float) -> ev.Drop:
        request = entry.request
        figures: dict[str, Figure] = {
            "waited_s": now - request.arrival,
            "hopeless": entry.hopeless,
            "paused": entry.paused,
            **fleet,
        }
        if not self.attended and not math.isinf(self.expected_at):
            figures["instance_starting"] = True
        if entry.pruned:
            figures["pruned"] = True
        return ev.Drop(request, Decision("expire", "waiting_time", request.id, now, figures, busy))

    def may_go(self, entry: Entry, instance: ShadowInstance, now: float) -> bool:
        """Whether the context is long enough and the request did not fail there. Suspects are computed alone.

        If no other instance takes it, it may go where it failed, though where it failed last only after a moment.
        Prefill instances whose KV found no way to a decode instance (`avoid`) come last: that would happen again.
        """
        request = entry.request
        if not self._long_enough(request, instance):
            return False
        if not self._apart(entry, instance, now):
            return False
        if instance.id not in entry.excluded:
            return True
        if self._another(request, entry.excluded):
            return False
        if instance.id in request.avoid and self._another(request, request.avoid):
            return False
        return now >= entry.retry_at or instance.id != request.failed_on[-1]

    def _apart(self, entry: Entry, instance: ShadowInstance, now: float) -> bool:
        """A suspect (`Suspects`) goes nowhere for a moment after a failure, and then where no other request waits for
        its first token; until it has its own, no other goes there. An instance is kept free for one that waits for
        that, or under load there would never be one."""
        if entry.request.ended:
            if now < entry.not_before:
                return False
            if instance.waiting and self._kept_free is None and instance.id not in entry.excluded:
                self._kept_free = entry.request.id, instance.id
            return not instance.waiting
        if instance.tests_suspect:
            return False
        if self._kept_free is None:
            return True
        name, where = self._kept_free
        if name not in self.queue or where not in self.instances or not self.instances[where].takes:
            self._kept_free = None
            return True
        return where != instance.id

    def steps(self) -> list[DecodeStep]:
        """Of all instances, as they were when the passes began or something was sent last."""
        if self._steps is None:
            self._steps = [DecodeStep(each, each.outstanding, step_beside(each)) for each in self.instances.values()]
        return self._steps

    def sent(self) -> None:
        """Something was: steps are others now."""
        self._steps = None

    def able(self, entry: Entry, instance: ShadowInstance) -> bool:
        """Whether the instance could take it now: it did not fail it, and has a slot and room for its KV."""
        return (
            instance.takes
            and instance.free_slots > 0
            and instance.id not in entry.excluded
            and instance.free_tokens() > instance.kv_need(entry.request)
            and self._long_enough(entry.request, instance)
        )

    def _another(self, request: Request, than: frozenset[str]) -> bool:
        """Whether an instance that is not among these takes it."""
        others = (other for other in self.instances.values() if other.takes and other.id not in than)
        return any(self._long_enough(request, other) for other in others)

    def _long_enough(self, request: Request, instance: ShadowInstance) -> bool:
        if self._longest is None:
            self._longest = longest_context(self.instances.values())
        return instance.long_enough(request, self._longest)

    def cheapest_hopeless(self, instance: ShadowInstance, scan_limit: int, now: float) -> Entry | None:
        """The first that may go there; one that failed there a moment ago is passed over."""
        entries = (entry for _, entry in islice(self.queue.hopeless, scan_limit))
        return next((entry for entry in entries if self.may_go(entry, instance, now)), None)

    def best(self) -> list[ShadowInstance]:
        """The instances of which none is slower in everything than another, among those that can serve next.

        Draining instances do not count, and sleeping ones only where no instance is awake. In a fleet of one kind of
        device this is one instance; what any of them could keep is not refused.
        """
        version = sum(instance.changes for instance in self.instances.values())
        if version != self._best_at:
            self._best_at, self._next = version, _serving_next(self.instances.values())
            self._best = undominated(self._next)
        return self._best

    def best_for(self, request: Request) -> list[ShadowInstance]:
        """`best`, and of those whose prefix cache has clearly more of the prompt the one that computes it soonest: a
        slower instance, or one of the same kind."""
        best, kind = self.best(), (request.tenant, request.slo_class)
        known = min((instance.cached.by_kind.get(kind, 0.0) for instance in best), default=0.0) + SAME_SHARE
        more = [each for each in self._next if each.cached.by_kind.get(kind, 0.0) > known and each.holds(request)]
        soonest = min(more, key=lambda each: each.prefill_s(request), default=None)
        return best if soonest is None or soonest in best else [*best, soonest]

    def cost(self, request: Request) -> Cost:
        """Predicted on the instance that would serve the request first if all were idle."""
        best = self.best_for(request)
        if len(best) == 1:
            return best[0].cost(request)
        costs = [instance.cost(request) for instance in best if instance.holds(request)]
        costs = costs or [instance.cost(request) for instance in best]
        return min(costs, key=lambda cost: _alone_s(request, cost)) if costs else GUESS.cost(request)

    def infeasible(self, request: Request, margin: float) -> dict[str, Figure] | None:
        """The figures and the field to change, if no instance could meet the targets even while it is idle.

        `margin` (1.2 = 20 %) allows for the error of the prediction, because a refusal cannot be taken back. Until an
        instance has been measured it grows by `ShadowInstance.doubt`.
        """
        best = self.best_for(request)
        best = [instance for instance in best if instance.holds(request)] or best
        refusals = []
        for instance in best:
            cost = instance.cost(request)
            refusal = _infeasible(request, cost, margin * (1.0 + instance.error), *instance.doubt())
            if refusal is None:
                return None
            refusals.append((cost.prefill_s, refusal))
        return min(refusals, key=lambda each: each[0])[1] if refusals else None

    def needed(self, now: float) -> set[str]:
        """Ids of instances that alone can keep the targets of some recent request."""
        return self.keepers.needed(self._serving(), self.best(), now)

    def wanted(self, now: float) -> set[str]:
        """Ids of instances that left and keep the targets of some recent request that none keeps which serves."""
        return self.keepers.wanted(self._serving(), self.best(), now)

    def _serving(self) -> list[ShadowInstance]:
        return [instance for instance in self.instances.values() if instance.takes]

    def _reference_cost(self) -> tuple[float, float] | None:
        """Seconds to a first byte and of a decode step on the best instances; None where there are none."""
        best = self.best()
        if not best:
            return None
        squares = REFERENCE_TOKENS**2
        first = min(
            each.latency.prefill_sums(REFERENCE_TOKENS, squares) + each.first_byte_s(REFERENCE_TOKENS) for each in best
        )
        return first, min(instance.latency.decode(1, REFERENCE_TOKENS) for instance in best)

    def screen(self, now: float) -> list[ev.Refuse]:
        """Defer or refuse requests that cannot make it behind those before them in the queue."""
        able = [instance for instance in self.instances.values() if instance.takes]
        if self._screening is None or not able or not self.queue.ready:
            return []
        backlog = min(instance.waiting_prefill_s() for instance in able)
        waiting = [entry.request for _, entry in self.queue.ready if not entry.forced]
        refused: list[ev.Refuse] = []
        for name in self._screening.screen(waiting, _prefill_of_all(able), backlog, len(able), now):
            if not self._screening.refuses:
                self.queue.give_up(name, now)
            elif (entry := self.queue.remove(name)) is not None:
                waited: dict[str, Figure] = {"waited_s": now - entry.request.arrival, "queued": len(self.queue)}
                refused.append(refuse(entry.request, "slo_infeasible", "unattainable_in_queue", 1.0, now, waited))
        return refused

    def retry_after_s(self) -> float:
        """Seconds in which all instances together would prefill the present queue; at least one second."""
        if not self.instances:
            return 5.0
        rates = sum(1.0 / max(each.latency.prefill_sums(1000, 0), 1e-6) for each in self.instances.values())
        return max(1.0, self.queue.tokens / 1000 / rates)


class Fleet(Roster):
    """The instances of a dispatcher, each in the lane of its model."""

    def __init__(self, new_lane: Callable[[], Lane]) -> None:
        super().__init__()
        self._new_lane = new_lane
        self.lanes: dict[str, Lane] = {}

    def lane(self, model: str) -> Lane:
        found = self.lanes.get(model)
        if found is None:
            found = self.lanes[model] = self._new_lane()
        return found

    def up(self, event: ev.InstanceUp) -> ShadowInstance:
        instance = super().up(event)
        self.lane(instance.spec.model).join(instance)
        return instance

    def down(self, instance_id: str) -> ShadowInstance | None:
        instance = super().down(instance_id)
        if instance is not None:
            self.lane(instance.spec.model).leave(instance)
        return instance


def _prefill_of_all(able: Sequence[ShadowInstance]) -> Callable[[int], float]:
    """Seconds for prompt tokens on one of as many equal instances that together prefill as fast as these."""
    rates = [1.0 / max(1e-9, each.latency.prefill_sums(REFERENCE_TOKENS, 0)) for each in able]
    one = able[0].latency
    factor = len(able) * rates[0] / sum(rates)
    return lambda tokens: factor * one.prefill_sums(tokens, 0)


def _differs(costs: tuple[float, float], than: tuple[float, float]) -> bool:
    return any(abs(new - old) > JUDGE_AGAIN * old for new, old in zip(costs, than, strict=True))


def _serving_next(instances: Iterable[ShadowInstance]) -> list[ShadowInstance]:
    staying = [
        instance for instance in instances if instance.state != "draining" and instance.spec.role is not Role.DECODE
    ]
    return [instance for instance in staying if instance.takes] or staying


def undominated(able: Iterable[ShadowInstance]) -> list[ShadowInstance]:
    """Those of which none is slower in everything than another."""
    best: list[ShadowInstance] = []
    for instance in sorted(
        able, key=lambda each: (each.latency.coefficients, -each.spec.max_model_len, _delay(each), each.id)
    ):
        if not any(_dominates(other, instance) for other in best):
            best.append(instance)
    return best


def _dominates(one: ShadowInstance, other: ShadowInstance) -> bool:
    """At least as fast in everything, even if `other` is as much faster than predicted as it may be."""
    mine, theirs = one.latency.coefficients, other.latency.coefficients
    prefill, decode = (max(1.0, b / a) for a, b in zip(one.doubt(), other.doubt(), strict=True))
    return (
        one.spec.max_model_len >= other.spec.max_model_len
        and _delay(one) <= _delay(other)
        and all(a * prefill <= SAME_COST * b for a, b in zip(mine[:3], theirs[:3], strict=True))
        and all(a * decode <= SAME_COST * b for a, b in zip(mine[3:], theirs[3:], strict=True))
    )


def _delay(instance: ShadowInstance) -> float:
    """Seconds from the end of a prefill of usual length to its first byte."""
    return instance.first_byte_s(REFERENCE_TOKENS)


def _alone_s(request: Request, cost: Cost) -> float:
    """Seconds of the whole answer on an idle instance, at least."""
    return cost.prefill_s + max(0, request.surest_tokens - 1) * cost.decode_step_s


def _infeasible(
    request: Request, cost: Cost, margin: float, prefill_doubt: float, decode_doubt: float
) -> dict[str, Figure] | None:
    targets = request.targets
    if request.surest_tokens > 1 and TPOT_MARGIN * decode_doubt * targets.tpot_s < cost.decode_step_s:
        return {"field": "target_tbt", "decode_step_s": cost.decode_step_s, "tpot_s": targets.tpot_s}
    least = cost.prefill_s / prefill_doubt + (_alone_s(request, cost) - cost.prefill_s) / decode_doubt
    if targets.deadline_s is not None and least > margin * targets.deadline_s:
        return {"field": "deadline", "answer_s": _alone_s(request, cost), "deadline_s": targets.deadline_s}
    field, name, bound = "target_ttft", "ttft_s", targets.ttft_s
    if targets.thinking_s is not None:  # the first token's target is a guess then
        field, name, bound = "thinking_deadline", "thinking_deadline_s", targets.thinking_s
    # With a deadline alone, the target is cut to it: then the deadline is what asks too much.
    if targets.deadline_s is not None and targets.deadline_s <= bound:
        field, name, bound = "deadline", "deadline_s", targets.deadline_s
    if cost.prefill_s <= margin * prefill_doubt * bound:
        return None
    if field == "thinking_deadline":
        return {"field": field, "prefill_s": cost.prefill_s, "thinking_deadline_s": bound}
    return {"field": field, "prefill_s": cost.prefill_s, name: bound}


def step_beside(instance: ShadowInstance) -> float:
    """Seconds of a decode step with one more sequence like those there."""
    ours = len(instance.waiting) + len(instance.running)
    return instance.decode_with((instance.context_tokens + instance.waiting_tokens) // max(1, ours))


def guessed(instance: ShadowInstance) -> bool:
    """Whether nobody profiled it and too little was measured yet: a plan on guesses would defer what can be in time."""
    return instance.spec.latency is None and instance.doubt() != (1.0, 1.0)


def speed_of(instance: ShadowInstance) -> float:
    """Requests/s of REFERENCE_TOKENS and REFERENCE_ANSWER that its stage could do with all slots in use; 0 as long as
    that is only guessed."""
    if guessed(instance):
        return 0.0
    seconds, slots = 0.0, instance.max_num_seqs
    if instance.spec.role is not Role.DECODE:
        seconds += instance.latency.prefill_sums(REFERENCE_TOKENS, REFERENCE_TOKENS**2)
    if instance.decodes:
        seconds += REFERENCE_ANSWER * instance.latency.decode(slots, slots * REFERENCE_TOKENS) / slots
    return 1.0 / seconds if seconds > 0 else 0.0


def longest_context(instances: Iterable[ShadowInstance]) -> int:
    """In tokens, of instances that prefill; 0 without any. Sleeping ones count, since requests wait for them; draining
    ones do not."""
    able = (each for each in instances if each.state != "draining" and each.spec.role is not Role.DECODE)
    return max((each.spec.max_model_len for each in able), default=0)


def steps_of(instance: ShadowInstance) -> tuple[float, float]:
    """Seconds of a decode step beside what is there, and of the quickest one. No guess makes a request late."""
    quicker = instance.doubt()[1] if guessed(instance) else 1.0
    return step_beside(instance), instance.latency.decode(1, 0) / quicker


def replica_of(instance: ShadowInstance) -> Replica:
    """What the instance takes for a request, by what was measured so far."""
    k = instance.latency.coefficients
    pace = instance.decode_pace or ev.DecodePace(instance.id, 0.0, 0.0, 0.0)
    if instance.decodes:
        pace = ev.DecodePace(instance.id, *steps_of(instance), instance.outstanding)
    free_slots = instance.free_slots if instance.decodes else 1
    cached = instance.cached.by_kind
    return Replica(instance.id, pace.token_s, pace.alone_s, k.prefill_b, k.prefill_c, pace.crowd, free_slots, cached)
