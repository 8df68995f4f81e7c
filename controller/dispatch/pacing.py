"""Pacing: how much an instance is sent before it has finished what it has. Registered by name.

`Unlimited` and `FixedWindow` are what routers do today; `Maturity` is HyperFlexis (Alg. 1, eq. 5, App. B); `Backlog`
evaluates eq. 5 at every event instead of at maturity times, so that no arrival waits for an instance that has room.

Eq. 5 and 7 bound prefill work and say nothing of which sequences share a step, of which each makes it longer. So a
request that can wait does not go where an answer would miss its TPOT for it (`spare_s`), nor where its own steps would
be too long; and requests that are content with long steps go together (`joins_others`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from controller.core.errors import ConfigError
from controller.core.policy import Cost
from controller.core.registry import Registry
from controller.core.types import Request
from controller.dispatch.lane import DecodeStep, Lane, guessed, step_beside
from controller.dispatch.queue import Entry
from controller.dispatch.shadow_state import ShadowInstance
from controller.dispatch.sole_keepers import CLEARLY

MOST_MISSING = 1  # see `spares`
NEAR = 0.85  # of a TPOT: a longer step leaves too little for the prompts that come between
SPARE_AGAIN_S = 0.05  # two decode steps: until answers are looked at again, if none comes or goes
LEAST_BATCHES = 2.0  # constant parts of a prefill that may be sent however tight a TTFT, or only idle ones take any
MOST_PREFILLING = 0.9  # share of an instance's time: what is left then, decodes get however many prompts come


class RecentDemand(NamedTuple):
    """What recent requests of a lane ask for, and how many wait in the gateway, by instance. Infinite: not known."""

    ttft_s: float = math.inf  # the tightest
    tpot_s: float = math.inf
    queued: float = math.inf


def recent_demand(lane: Lane, now: float) -> RecentDemand:
    ttft_s, tpot_s = (recent.tightest(now, default=math.inf) for recent in (lane.traffic, lane.paces))
    return RecentDemand(ttft_s, tpot_s, len(lane.queue.ready) / max(1, len(lane.instances)))


def note_targets(lane: Lane, request: Request, cost: Cost, now: float) -> None:
    """Remember the targets of an arrival, unless no instance keeps them with anything else to do (`cost`: on the best
    one): room that is left free for such a target is of use to nobody. One token has no pace."""
    targets = request.targets
    if targets.ttft_s >= cost.prefill_s + cost.first_byte_s + cost.decode_step_s:
        lane.traffic.add(targets.ttft_s, now)
    if request.output_tokens > 1 and targets.tpot_s >= cost.decode_step_s:
        lane.paces.add(targets.tpot_s, now)


class Room(NamedTuple):
    """What an instance may take now: prompt tokens (strictly fewer), sequences, seconds of prefill work before it.

    `lone_s`: or one prompt that cannot wait so many seconds, if hardly an answer there would miss its TPOT for it
    (`spares`). `amortised`: whether decodes get steps in proportion to each prefill (eq. 5 and 7).
    """

    tokens: float
    slots: float
    backlog_s: float
    lone_s: float = 0.0
    amortised: bool = True


def spares(instance: ShadowInstance, prefill_s: float, now: float) -> bool:
    """Whether at most one answer there can keep its mean TPOT now and not after so many seconds of prefill work: what
    is gained is then no less than what is lost."""
    step_s = instance.decode_s()
    missing = 0
    for sent in instance.running.values():
        waits = sent.waits_until(step_s)
        if waits is not None and 0 < waits[0] - now < prefill_s:
            missing += 1
            if missing > MOST_MISSING:
                return False
    return True


class SpareTime(NamedTuple):
    """`spare_s` of an instance at a time. `sequences`: by which one sees that some came or went."""

    at: float
    sequences: tuple[int, int, int]
    seconds: float


def spare_s(instance: ShadowInstance, now: float) -> float:
    """Seconds of prefill work that all answers there which keep their mean TPOT can wait through beside one more
    sequence, and still keep it; infinite where none is bound to one. Cost: O(batch)."""
    before, after = instance.decode_s(), step_beside(instance)
    spare = math.inf
    for sent in instance.running.values():
        waits = sent.waits_until(after)
        if waits is not None and waits[0] - now < spare and (sent.waits_until(before) or waits)[0] > now:
            spare = waits[0] - now
    for sent in instance.waiting.values():
        tpot_s = sent.request.targets.tpot_s
        if sent.binds and before <= tpot_s:
            spare = min(spare, (sent.to_come - 1) * (tpot_s - after))
    return spare


def patient_until(entry: Entry, share: float) -> float:
    """When less than this share is left of the time in which the request must be sent. Some admissions know no such
    time: then it does not wait."""
    if math.isinf(entry.hopeless_at):
        return -math.inf
    return entry.hopeless_at - share * (entry.hopeless_at - entry.request.arrival)


def too_slow(entry: Entry, instance: ShadowInstance, step_s: float) -> bool:
    """Whether its decode steps there (`step_s`) would be longer than its TPOT, and would not be if it were alone."""
    request = entry.request
    tpot_s = request.targets.tpot_s
    return request.output_tokens > 1 and step_s > tpot_s >= instance.latency.decode(1, request.prompt_tokens)


def only_elsewhere(entry: Entry, instance: ShadowInstance, cost: Cost, now: float) -> bool:
    """Whether it would miss its TPOT or its deadline there even alone (`cost`), and would not on the instance that
    serves it soonest. Instances that predictions cannot tell apart count as equal. One of which too little was measured
    to know gets one at a time, or a wrong profile would never be corrected."""
    request, best = entry.request, entry.cost
    prefill_doubt, decode_doubt = (1.0, 1.0) if instance.outstanding else instance.doubt()
    targets, steps = request.targets, max(0, request.surest_tokens - 1)
    step_s = cost.decode_step_s / decode_doubt
    if request.output_tokens > 1 and step_s > targets.tpot_s >= best.decode_step_s:
        return step_s > CLEARLY * best.decode_step_s
    if targets.deadline_s is None:
        return False
    left_s = request.arrival + targets.deadline_s + entry.made_up_s - now
    here_s = cost.prefill_s / prefill_doubt + cost.first_byte_s + steps * step_s
    best_s = best.prefill_s + best.first_byte_s + steps * best.decode_step_s
    return here_s > left_s >= best_s and here_s > CLEARLY * best_s


def token_s(step: DecodeStep, now: float) -> float:
    """Seconds between two tokens there: one decode step, and what prompts took of the instance's time lately, also
    those of other gateways and clients."""
    return step.seconds / (1.0 - min(MOST_PREFILLING, step.instance.prefilling_of_all(now)))


def joins_others(entry: Entry, instance: ShadowInstance, lane: Lane, step_s: float, margin: float, now: float) -> bool:
    """Whether an able instance that has more to do should have the request: its steps here (`step_s`) would be near the
    tightest TPOT of recent traffic, and it has time for tokens that take `margin` times as long as those of the
    other."""
    targets, tight_s = entry.request.targets, lane.paces.tightest(now, default=math.inf)
    if targets.tpot_s * NEAR <= tight_s or step_s <= NEAR * tight_s:
        return False
    pace_s = targets.tpot_s
    if targets.deadline_s is not None:
        left_s = entry.request.arrival + targets.deadline_s - now - entry.cost.prefill_s + entry.made_up_s
        pace_s = min(pace_s, left_s / max(1, entry.request.output_tokens))
    here = instance.outstanding
    return any(
        step.outstanding > here
        and margin * token_s(step, now) <= pace_s
        and step.instance is not instance
        and lane.able(entry, step.instance)
        for step in lane.steps()
    )


def in_doubt(entry: Entry, instance: ShadowInstance, lane: Lane, share: float, now: float) -> bool:
    """Whether its workflow has less time left than the step and those after it need there, if decode steps are longer
    than alone by `share` times the factor by which they are where most runs. Later steps are taken to need as much more
    as they were given more time. The expected length counts, since nothing is given up for it (decision 41)."""
    request, deadline_s = entry.request, entry.request.targets.deadline_s
    if deadline_s is None or deadline_s <= 0 or request.output_tokens < 2:
        return False
    left_s = deadline_s if request.workflow_left_s is None else request.workflow_left_s
    longest = max(each.seconds / each.instance.latency.decode(1, 0) for each in lane.steps() if each.instance.decodes)
    step_s = share * longest * instance.latency.decode(1, request.prompt_tokens)
    needed_s = entry.cost.prefill_s + entry.cost.first_byte_s + (request.output_tokens - 1) * step_s
    return request.arrival + left_s - now < max(1.0, left_s / deadline_s) * needed_s


class Pacing(Protocol):
    name: ClassVar[str]
    per_pass: int | None  # requests sent before the next instance is chosen; None: all that fit
    exact: bool  # check eq. 7 with the full eq. 1 after choosing (H5)

    def ready(self, instance: ShadowInstance, now: float) -> bool: ...

    def room(self, instance: ShadowInstance, demand: RecentDemand, tpot_s: float, now: float) -> Room:
        """`tpot_s`: the tightest of what is there and of what is to go there."""
        ...

    def waits_until(self, entry: Entry, instance: ShadowInstance, lane: Lane, room: Room, now: float) -> float:
        """Until when the request, which there is room for, should not go beside the answers there; `now` if it may."""
        ...

    def keeps(self, entry: Entry, instance: ShadowInstance, cost: Cost, now: float) -> bool:
        """Whether the request may go there, whose `cost` there is given: False while another instance keeps targets
        that this one cannot."""
        ...

    def passed(self, instance: ShadowInstance, now: float) -> None:
        """A pass over this instance ended, whether something was sent or not."""
        ...

    def prefilled(self, instance: ShadowInstance, prefill_s: float, now: float) -> None:
        """A prefill of this predicted length ended there."""
        ...

    def ended(self, instance: ShadowInstance, now: float) -> None:
        """A request left the instance."""
        ...

    def spare(self, instance: ShadowInstance, demand: RecentDemand, now: float) -> bool:
        """Whether there is room that nothing else needs, which a hopeless request may have."""
        ...

    def wake_at(self, instance: ShadowInstance, now: float) -> float:
        """When time alone makes the instance ready; infinite if only an event can."""
        ...


PACINGS: Registry[type[Pacing]] = Registry("pacing")


class Anywhere:
    """For pacings that do not mind which answers are where."""

    def keeps(self, entry: Entry, instance: ShadowInstance, cost: Cost, now: float) -> bool:
        return True

    def waits_until(self, entry: Entry, instance: ShadowInstance, lane: Lane, room: Room, now: float) -> float:
        return now


class EventOnly(Anywhere):
    """For pacings that only events change, not the passing of time."""

    exact = False
    per_pass: int | None = 1

    def passed(self, instance: ShadowInstance, now: float) -> None:
        """Nothing to plan."""

    def prefilled(self, instance: ShadowInstance, prefill_s: float, now: float) -> None:
        """Nothing to plan."""

    def ended(self, instance: ShadowInstance, now: float) -> None:
        """Nothing to plan."""

    def wake_at(self, instance: ShadowInstance, now: float) -> float:
        return math.inf


@PACINGS.register("unlimited")
class Unlimited(EventOnly):
    """Everything is sent at once; the engine queues."""

    name: ClassVar[str] = "unlimited"

    @dataclass(frozen=True, slots=True)
    class Config:
        """Nothing to set."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def ready(self, instance: ShadowInstance, now: float) -> bool:
        return True

    def room(self, instance: ShadowInstance, demand: RecentDemand, tpot_s: float, now: float) -> Room:
        return Room(math.inf, math.inf, 0.0)

    def spare(self, instance: ShadowInstance, demand: RecentDemand, now: float) -> bool:
        return True


@PACINGS.register("fixed_window")
class FixedWindow(EventOnly):
    """At most `window` requests at each engine. The right window changes with the load; a wrong one is costly."""

    name: ClassVar[str] = "fixed_window"

    @dataclass(frozen=True, slots=True)
    class Config:
        window: int = 20

        def __post_init__(self) -> None:
            if self.window < 1:
                raise ConfigError("window must be at least 1 request", field="window")

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def ready(self, instance: ShadowInstance, now: float) -> bool:
        return instance.outstanding < self.config.window

    def room(self, instance: ShadowInstance, demand: RecentDemand, tpot_s: float, now: float) -> Room:
        return Room(math.inf, self.config.window - instance.outstanding, 0.0)

    def spare(self, instance: ShadowInstance, demand: RecentDemand, now: float) -> bool:
        return self.ready(instance, now)


@PACINGS.register("maturity")
class Maturity(Anywhere):
    """HyperFlexis: an instance takes one batch within its token budget (eq. 5) and is left alone until it is mature.

    Branches that Alg. 1 lacks: an idle instance with nothing admitted stays mature and sleeps until an event; with
    E_d >= TPOT the budget is 0 and the instance matures when something running ends (never at a time in the past).
    """

    name: ClassVar[str] = "maturity"
    per_pass: int | None = None
    exact = True

    @dataclass(frozen=True, slots=True)
    class Config:
        """Nothing to set: eq. 5 has no knob."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def ready(self, instance: ShadowInstance, now: float) -> bool:
        return instance.mature_at <= now and instance.free_slots > 0

    def room(self, instance: ShadowInstance, demand: RecentDemand, tpot_s: float, now: float) -> Room:
        decode_s = instance.decode_s()
        tokens = instance.latency.token_budget(demand.ttft_s, tpot_s, decode_s, instance.waiting_new)
        return Room(tokens, instance.free_slots, instance.waiting_prefill_s())

    def passed(self, instance: ShadowInstance, now: float) -> None:
        """Maturity covers B_wait and R together (Alg. 1); the instance's `waiting` already holds both."""
        after = instance.latency.maturity(instance.waiting_prefill_s(), instance.decode_s(), instance.tightest_tpot())
        instance.mature_at = now + after

    def prefilled(self, instance: ShadowInstance, prefill_s: float, now: float) -> None:
        """If nothing waits there any more, an infinite maturity is over."""
        if math.isinf(instance.mature_at) and not instance.waiting:
            instance.mature_at = now

    def ended(self, instance: ShadowInstance, now: float) -> None:
        if instance.mature_at > now and (math.isinf(instance.mature_at) or not instance.outstanding):
            instance.mature_at = now

    def spare(self, instance: ShadowInstance, demand: RecentDemand, now: float) -> bool:
        return self.ready(instance, now) and not instance.waiting

    def wake_at(self, instance: ShadowInstance, now: float) -> float:
        return instance.mature_at if instance.mature_at > now else math.inf


@PACINGS.register("backlog")
class Backlog:
    """Eq. 7 kept continuously: prefill work sent and not finished stays below a share of the tightest TTFT.

    backlog = tail + E_P(waiting) x TPOT / (TPOT - E_d); a request fits while backlog plus its own share stays below
    min(share x TTFT, most_s), of which each of several gateways has its share of the instance (decision 239). `tail` is
    the amortisation (E_P / relax x E_d) of prefills that ended just now, which leaves running decodes the steps they
    need to keep their mean TPOT. What the engine reports early (first tokens) frees room at once.

    `share` 0.4 of the tightest recent TTFT, so that the next arrival still has the rest for itself (decision 3
    compares 0.25, 0.4, 0.6 and 0.9); `most_s` 1.0: more work than that in the engine would only be out of the queue's
    order; `stall_share` 0.4: of the time that the decodes there can wait for prefills and still keep their mean TPOT
    (decision 154); `spare_slots` 0.25: the share of sequence slots that must be free before a hopeless request gets
    one; `few_queued` 1.5: while at most so many requests an instance wait and no other gateway sends there, no stream
    of prefills follows, and that time bounds them alone; who cannot wait `most_s` may go alone (decision 266).
    `patience` 0.3: meanwhile, who has more than that share of its time left waits for an instance where no TPOT is
    missed for it (decision 280); `margin` 2.5: who has time for that many times what a token takes on a busier one goes
    there (decision 321). `near` 0.6: where a step takes more than that share of the tightest TPOT of recent traffic,
    sequences make answers late and not prefills: what holds for a short queue holds for a long one too, `near_share`
    0.8 takes the place of `share`, and hopeless requests go to idle instances only (decision 291). `doubt` 0.45: a step
    whose workflow is late if steps are that share of what they are where most runs, compared to alone, waits for an
    idle instance or for shorter steps (decision 304). Targets that the instance, or all of them, cannot keep bound
    nothing, and a request does not go where it would miss its own while another instance keeps them (decision 326).
    """

    name: ClassVar[str] = "backlog"
    per_pass: int | None = 1
    exact = True

    @dataclass(frozen=True, slots=True)
    class Config:
        share: float = 0.4
        most_s: float = 1.0
        spare_slots: float = 0.25
        stall_share: float = 0.4
        few_queued: float = 1.5
        patience: float = 0.3
        margin: float = 2.5
        near: float = 0.6
        doubt: float = 0.45
        near_share: float = 0.8

        def __post_init__(self) -> None:
            if not 0 < self.share <= 1:
                raise ConfigError("share must lie in (0, 1]", field="share")
            if not self.most_s > 0:
                raise ConfigError("most_s must be positive seconds", field="most_s")
            if not 0 <= self.spare_slots <= 1:
                raise ConfigError("spare_slots must lie in [0, 1]", field="spare_slots")
            if not 0 < self.stall_share <= 1:
                raise ConfigError("stall_share must lie in (0, 1]", field="stall_share")
            if not self.few_queued >= 0:
                raise ConfigError("few_queued must be at least 0 requests", field="few_queued")
            if not 0 <= self.patience <= 1:
                raise ConfigError("patience must lie in [0, 1]", field="patience")
            if not self.margin >= 1:
                raise ConfigError("margin must be at least 1", field="margin")
            if not self.near > 0:
                raise ConfigError("near must be positive", field="near")
            if not self.doubt >= 0:
                raise ConfigError("doubt must be at least 0", field="doubt")
            if not 0 < self.near_share <= 1:
                raise ConfigError("near_share must lie in (0, 1]", field="near_share")

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        self._spares: WeakKeyDictionary[ShadowInstance, SpareTime] = WeakKeyDictionary()

    def ready(self, instance: ShadowInstance, now: float) -> bool:
        return instance.free_slots > 0 or instance.spec.selects

    def room(self, instance: ShadowInstance, demand: RecentDemand, tpot_s: float, now: float) -> Room:
        if instance.spec.selects:
            return Room(math.inf, math.inf, 0.0)
        waiting = instance.waiting_prefill_s()
        near = self._near(instance, demand) and instance.share == 1.0
        share = self.config.near_share if near else self.config.share
        allowed = instance.share * min(share * demand.ttft_s, self.config.most_s)
        allowed = max(allowed, LEAST_BATCHES * instance.latency.coefficients.prefill_a)
        few = near or (instance.share == 1.0 and demand.queued <= self.config.few_queued)
        if few:
            backlog, decode_s, tpot_s = waiting, 0.0, math.inf
        else:
            decode_s, tail = instance.decode_s(), max(0.0, instance.mature_at - now)
            backlog = tail + instance.latency.maturity(waiting, decode_s, tpot_s)
        tokens = instance.latency.token_budget(allowed - backlog, tpot_s, decode_s) if backlog < allowed else 0
        if tokens > 0:
            stall_s = self.config.stall_share * instance.stall_s(now)
            if stall_s - waiting < allowed:
                tokens = min(tokens, instance.latency.token_budget(stall_s - waiting, math.inf, 0.0))
        lone_s = self.config.most_s if few and not instance.waiting else 0.0
        return Room(tokens, instance.free_slots, waiting, lone_s, amortised=not few)

    def waits_until(self, entry: Entry, instance: ShadowInstance, lane: Lane, room: Room, now: float) -> float:
        if room.amortised or entry.forced or guessed(instance) or not (instance.decodes and instance.outstanding):
            return now
        if now < entry.hopeless_at < math.inf and in_doubt(entry, instance, lane, self.config.doubt, now):
            return entry.hopeless_at
        until = patient_until(entry, self.config.patience)
        if until <= now:
            return now
        step_s = instance.decode_with(entry.request.prompt_tokens)
        waits = (
            too_slow(entry, instance, step_s)
            or entry.cost.prefill_s > self._spare(instance, now)
            or joins_others(entry, instance, lane, step_s, self.config.margin, now)
        )
        return until if waits else now

    def keeps(self, entry: Entry, instance: ShadowInstance, cost: Cost, now: float) -> bool:
        """One that failed elsewhere goes where it can, and one that is late for its stage where there is room."""
        free = entry.forced or entry.excluded or entry.request.ended or entry.late_at <= now
        return bool(free) or not only_elsewhere(entry, instance, cost, now)

    def _near(self, instance: ShadowInstance, demand: RecentDemand) -> bool:
        """Whether a decode step beside one more sequence is near the tightest TPOT of recent traffic, which one alone
        would keep here."""
        if not instance.decodes or instance.latency.decode(1, 0) > demand.tpot_s:
            return False
        return step_beside(instance) > self.config.near * demand.tpot_s

    def _spare(self, instance: ShadowInstance, now: float) -> float:
        """`spare_s`, computed again once a sequence comes or goes there, or after SPARE_AGAIN_S."""
        sequences = instance.sent_total, len(instance.waiting), len(instance.running)
        known = self._spares.get(instance)
        if known is None or known.sequences != sequences or now >= known.at + SPARE_AGAIN_S:
            known = self._spares[instance] = SpareTime(now, sequences, spare_s(instance, now))
        return known.seconds

    def passed(self, instance: ShadowInstance, now: float) -> None:
        """Nothing to plan: room is computed when it is needed."""

    def prefilled(self, instance: ShadowInstance, prefill_s: float, now: float) -> None:
        tpot = instance.tightest_tpot()
        amortise = instance.latency.maturity(prefill_s, instance.decode_s(), tpot) - prefill_s
        if 0 < amortise < math.inf:
            instance.mature_at = max(instance.mature_at, now) + min(amortise, self.config.most_s)

    def ended(self, instance: ShadowInstance, now: float) -> None:
        if not instance.outstanding:
            instance.mature_at = min(instance.mature_at, now)

    def spare(self, instance: ShadowInstance, demand: RecentDemand, now: float) -> bool:
        free = instance.free_slots
        if instance.outstanding and self._near(instance, demand):
            return False
        return not instance.waiting and free > 0 and free >= self.config.spare_slots * instance.slots

    def wake_at(self, instance: ShadowInstance, now: float) -> float:
        return instance.mature_at if instance.mature_at > now else math.inf
