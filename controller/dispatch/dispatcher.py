"""The dispatcher: which request goes to which instance, and when. HyperFlexis Alg. 1 as a state machine without I/O.

Events come in batches with one `now`; the answer is a list of actions and the next wake-up. One class serves all
policy sets: ordering, admission, routing and pacing are its parts, and a baseline differs from the default in these
only. Nothing here reads a clock, a socket or a random generator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from controller.core import events as ev
from controller.core.decisions import Alternative, Decision, Figure
from controller.core.errors import ConfigError
from controller.core.policy import Admission, Copy, Ordering, Routing, learns
from controller.core.snapshot import FleetState
from controller.core.types import LatencyCoefficients, Request
from controller.dispatch.lane import GO_ON_S, MOST_NAMED, Fleet, Lane, RecentTargets, refuse, speed_of
from controller.dispatch.learned import learned_states
from controller.dispatch.orders import OrderBook
from controller.dispatch.pacing import Pacing, Room, note_targets, recent_demand, spares
from controller.dispatch.queue import Entry, Journal, QueueView, RequestQueue
from controller.dispatch.shadow_state import ShadowInstance
from controller.dispatch.sole_keepers import Keepers

# These start no pass: they free no room, and most come often.
QUIET = frozenset({ev.Progress, ev.AnswerBounded, ev.Accepted, ev.ClockOffset, ev.FirstByteDelay, ev.DecodePace})
RETRY_SAME_S = 0.5  # before the instance that failed is tried again: by then it is known whether it is up
HELD_COST = 8  # skipped requests, as one counts that waits for a TPOT: to find that out takes longer
HOPELESS_RANK = 1 << 40  # behind every request that can still make it
ENGINE_RANKS = ("none", "class", "deadline")


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Settings of a dispatcher.

    `engine_rank`: what the engine is told about urgency. `scan_limit`: a pass ends after this many requests that do not
    fit (Alg. 1 scans the whole queue; an instance that is nearly full would cost O(n) for nothing).
    `most_engines_ended`, `quarantine_s`: see `Suspects`.
    """

    engine_rank: str = "none"
    max_queue: int = 20_000
    max_attempts: int = 3
    most_engines_ended: int = 2
    quarantine_s: float = 600.0
    scan_limit: int = 32
    refuse_infeasible: bool = True
    infeasible_margin: float = 1.2
    tightest_share: float = 0.05
    traffic_window_s: float = 30.0

    def __post_init__(self) -> None:
        if self.engine_rank not in ENGINE_RANKS:
            raise ConfigError(f"engine_rank must be one of {', '.join(ENGINE_RANKS)}", field="engine_rank")
        for name in ("max_queue", "max_attempts", "most_engines_ended", "scan_limit"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        for name in ("infeasible_margin", "traffic_window_s"):  # 0 would refuse all traffic, or forget it at once
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a number above 0", field=name)
        if not (math.isfinite(self.quarantine_s) and self.quarantine_s >= 0):
            raise ConfigError("quarantine_s must be a number of at least 0", field="quarantine_s")
        if not 0 <= self.tightest_share < 1:
            raise ConfigError("tightest_share must lie in [0, 1)", field="tightest_share")


class Chosen(NamedTuple):
    """`probability`: of meeting its targets there, as the admission sees it."""

    entry: Entry
    probability: float


class Pass:
    """One pass of Alg. 1 over the queue for one instance: what goes to it now, and how much room there was.

    It chooses, and sends nothing itself. `config`: how far down the queue it looks, and whose targets bind."""

    def __init__(self, config: DispatchConfig, admission: Admission, pacing: Pacing) -> None:
        self._config = config
        self._admission = admission
        self._pacing = pacing

    def choose(self, lane: Lane, instance: ShadowInstance, now: float) -> tuple[list[Chosen], Room]:
        """In the queue's order, what fits into the room the instance has under its own and the queue's targets."""
        demand = recent_demand(lane, now)
        tpot = instance.tightest_tpot(self._config.tightest_share)
        room = self._pacing.room(instance, demand, tpot, now)
        free_tokens = math.inf if math.isinf(room.slots) else instance.free_tokens()  # no limit: the engine queues
        idle = not instance.outstanding
        chosen: list[Chosen] = []
        if not (idle or room.lone_s or room.tokens > 1):
            return chosen, room
        used = kv = skipped = 0
        decodes, cached = instance.decodes, instance.knows_prefixes  # read once: the loop is most of a pass
        lone = idle  # one prompt is sent whatever eq. 7 says
        for entry in lane.queue.ready_for(instance.id):
            if len(chosen) >= min(room.slots, self._pacing.per_pass or math.inf) or skipped >= self._config.scan_limit:
                break
            request = entry.request
            tighter = decodes and request.targets.tpot_s < tpot and request.output_tokens > 1
            own = self._pacing.room(instance, demand, request.targets.tpot_s, now) if tighter else room
            need = instance.kv_need(request)
            has_blocks = kv + need < free_tokens
            new = instance.uncached(request)[0] if cached else request.prompt_tokens
            fits = used + new < own.tokens and has_blocks
            # A prompt beyond any budget goes where no prefill waits and decodes have slack, or it would never go.
            alone = not chosen and (idle or (has_blocks and not instance.waiting_before and own.tokens > 1))
            if not (fits or alone or chosen) and has_blocks and entry.late_at - now < own.lone_s:
                alone = spares(instance, entry.cost.prefill_s, now)
            if (fits or alone) and not self._may_go(lane, entry, instance, chosen, now):
                fits = alone = False
            cost = instance.cost(request) if fits or alone else None
            if cost is None or not self._pacing.keeps(entry, instance, cost, now):
                skipped += not request.ended  # many suspects in front must not hide the requests behind them
                continue
            until = self._pacing.waits_until(entry, instance, lane, own, now)
            if until > now:
                entry.waited_for_tpot = True
                lane.again_at = min(lane.again_at, until)
                skipped += HELD_COST
                continue
            judged = self._admission.judge(request, cost, instance, own.backlog_s, now)
            if not (judged.admit or entry.forced or entry.late_at <= now):  # late for its stage, not for its workflow
                skipped += 1
                continue
            if tighter:  # only what is sent limits the others
                tpot, room = request.targets.tpot_s, own
            lone = lone or not fits
            chosen.append(Chosen(entry, judged.probability))
            used += new
            kv += need
        if self._pacing.exact and not instance.spec.selects:
            self._check_exact(instance, chosen, demand.ttft_s, tpot if room.amortised else math.inf, lone)
        return chosen, room

    @staticmethod
    def _may_go(lane: Lane, entry: Entry, instance: ShadowInstance, chosen: list[Chosen], now: float) -> bool:
        """Also beside what this pass has chosen: a suspect goes alone."""
        if chosen and (entry.request.ended or chosen[-1].entry.request.ended):
            return False
        return lane.may_go(entry, instance, now)

    @staticmethod
    def _check_exact(instance: ShadowInstance, chosen: list[Chosen], ttft: float, tpot: float, lone: bool) -> None:
        """H5: eq. 5 drops the quadratic term; check eq. 7 once more with the full eq. 1 and let the last ones wait."""
        decode_s = instance.decode_s()
        while len(chosen) > (1 if lone else 0):
            new = [instance.uncached(entry.request) for entry, _ in chosen]
            tokens = instance.waiting_new + sum(tokens for tokens, _ in new)
            squares = instance.waiting_squares + sum(squares for _, squares in new)
            prefill = instance.latency.prefill_sums(tokens, squares)
            if instance.latency.maturity(prefill, decode_s, tpot) <= ttft:
                return
            chosen.pop()


class StageDispatcher:
    """Dispatches to collocated and prefill instances. `name` is the policy set it was built from.

    `orderings` builds another one by name and settings, for when it is exchanged.

    `journal` lists what changed in the queue since it was last read, while somebody follows it.
    """

    def __init__(
        self,
        name: str,
        config: DispatchConfig,
        *,
        ordering: Ordering,
        admission: Admission,
        routing: Routing,
        pacing: Pacing,
        orderings: Callable[[str, Mapping[str, Any]], Ordering],
    ) -> None:
        self.name = name
        self.config = config
        self._ordering = self._own_ordering = ordering
        self._orderings = orderings
        self._admission = admission
        self._routing = routing
        self._observers = self._learning()
        self._pacing = pacing
        self._pass = Pass(config, admission, pacing)
        self.journal = Journal()
        self.orders = OrderBook()
        self._fleet = Fleet(self._new_lane)
        self._sent: dict[str, ShadowInstance] = {}
        self._serial = 0
        self._now = 0.0
        self._wake_at = math.inf
        self._offset_s = 0.0
        self._handlers: dict[type, Callable[[Any, float, list[ev.Action]], None]] = {
            ev.Arrived: self._arrived,
            ev.Cancelled: self._cancelled,
            ev.FirstToken: self._first_token,
            ev.PrefillDone: self._prefill_done,
            ev.Progress: self._progress,
            ev.AnswerBounded: self._bounded,
            ev.Finished: self._finished,
            ev.Failed: self._failed,
            ev.InstanceUp: self._up,
            ev.InstanceDraining: self._draining,
            ev.Expected: self._expected,
            ev.Command: self._command,
            ev.ClockOffset: self._clock_offset,
            ev.Orders: self._ordered,
            ev.OrderingChosen: self._ordering_chosen,
            ev.FramesLearned: self._frames_learned,
        }

    # ---- the driver's side -----------------------------------------------------------------------------------------

    def handle(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """Take in what happened, then dispatch what can go. `now` never goes backwards."""
        now = self._now = max(now, self._now)
        actions: list[ev.Action] = []
        moved = now >= self._wake_at
        for event in events:
            moved = moved or type(event) not in QUIET
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event, now, actions)
            else:
                self._fleet.handle(event)
            for observe in self._observers:
                observe(event, now)
        if moved:
            if now >= self.orders.expires_at:
                actions += self.orders.expire(self._queues(), now)
            self._wake_at = self.orders.expires_at
            for lane in self._fleet.lanes.values():
                if len(lane.queue):
                    self._run(lane, now, actions)
                    self._wake_at = min(self._wake_at, self._wake(lane, now))
        return ev.Reply(actions, None if math.isinf(self._wake_at) else self._wake_at)

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """By model. Read only."""
        return self._fleet.lanes

    def queue(self) -> QueueView:
        return QueueView({model: lane.queue for model, lane in self._fleet.lanes.items()}, self._now)

    def waiting(self, request_id: str) -> bool:
        """Whether it is still in the queue: neither sent nor ended."""
        return any(request_id in lane.queue for lane in self._fleet.lanes.values())

    def holds(self, request_id: str) -> bool:
        """Whether it counts at an instance: it was sent there and has neither ended nor been prefilled."""
        return request_id in self._sent

    def computing(self, request_id: str) -> bool:
        """Whether it is at an instance and its first token has not come, and was not expected yet."""
        instance = self._sent.get(request_id)
        return instance is not None and request_id in instance.waiting

    def draining(self, instance_id: str) -> bool:
        instance = self._fleet.instances.get(instance_id)
        return instance is not None and instance.state == "draining"

    def pending_above(self, priority: int) -> bool:
        """Whether a request of a higher priority waits, for the contention rule of the priority mapping."""
        return any(lane.queue.pending_above(priority) for lane in self._fleet.lanes.values())

    def fleet(self, now: float) -> list[FleetState]:
        instances = self._fleet.instances
        states = [instance.view(now) for instance in instances.values()]
        needed = {name for lane in self._fleet.lanes.values() for name in lane.needed(now)} | self.wanted(now)
        for state in states:
            state.needed, state.speed = state.id in needed, speed_of(instances[state.id])
        return states

    def wanted(self, now: float) -> set[str]:
        """Ids of instances that drain or left, and that recent requests need."""
        return {name for lane in self._fleet.lanes.values() for name in lane.wanted(now)}

    def learned(self) -> dict[str, LatencyCoefficients]:
        """Latency coefficients by instance, as refitted."""
        return {instance.id: instance.latency.coefficients for instance in self._fleet.instances.values()}

    def learned_state(self) -> dict[str, dict[str, Any]]:
        """All that was learned of instances, for another process (`controller.dispatch.learned`)."""
        return learned_states(self._fleet.instances.values())

    def frames_state(self, now: float) -> dict[str, Any]:
        """By model, what another process goes on from where the ordering has frames (`ev.FramesLearned`)."""
        frames = {model: lane.queue.frames for model, lane in self._fleet.lanes.items()}
        states = {model: each.state(now) for model, each in frames.items() if each is not None}
        return {model: state for model, state in states.items() if state is not None}

    # ---- requests --------------------------------------------------------------------------------------------------

    def _arrived(self, event: ev.Arrived, now: float, actions: list[ev.Action]) -> None:
        request = event.request
        lane = self._fleet.lane(request.model)
        unserved = lane.unserved(request, now)
        if unserved is not None:
            actions.append(unserved)
            return
        if len(lane.queue) >= self.config.max_queue:
            inputs: dict[str, Figure] = {"queued": len(lane.queue), "bound": self.config.max_queue}
            actions.append(refuse(request, "rate_limit_exceeded", "queue_full", lane.retry_after_s(), now, inputs))
            return
        lane.keepers.noted.append((now, request))
        judged = request.judged
        if self.config.refuse_infeasible and lane.instances and judged is not None:
            figures = lane.infeasible(judged, self.config.infeasible_margin)
            if figures is not None:
                if request.whole_s is not None:
                    figures |= {"field": "workflow_deadline", "workflow_deadline_s": figures.pop("deadline_s")}
                actions.append(refuse(request, "slo_infeasible", "infeasible_alone", 60.0, now, figures))
                return
        cost = lane.cost(request)
        note_targets(lane, request, cost, now)
        entry = Entry(request, cost, now, event.avoid or request.avoid)
        entry.drop_at = max(entry.drop_at, now)  # a waiting time of 0 means this pass, however long reading it took
        lane.queue.add(entry, now)

    def _cancelled(self, event: ev.Cancelled, now: float, actions: list[ev.Action]) -> None:
        for lane in self._fleet.lanes.values():
            if lane.queue.remove(event.request_id) is not None:
                return
        instance = self._leave(event.request_id, now)
        if instance is not None:
            actions.append(ev.Abort(event.request_id, instance.id))

    def _first_token(self, event: ev.FirstToken, now: float, actions: list[ev.Action]) -> None:
        instance = self._sent.get(event.request_id)
        sent = instance.waiting.get(event.request_id) if instance is not None else None
        if instance is None or sent is None:
            return
        instance.first_token(event.request_id, now, assumed=event.assumed)
        self._pacing.prefilled(instance, sent.prefill_s, now)

    def _prefill_done(self, event: ev.PrefillDone, now: float, actions: list[ev.Action]) -> None:
        """Its decode stage belongs to the migrator."""
        instance = self._sent.pop(event.request.id, None)
        if instance is not None:
            instance.prefill_done(event.request.id, now)
            self._pacing.ended(instance, now)

    def _progress(self, event: ev.Progress, now: float, actions: list[ev.Action]) -> None:
        instance = self._sent.get(event.request_id)
        if instance is not None:
            instance.progress(event.request_id, event.tokens, now)

    def _bounded(self, event: ev.AnswerBounded, now: float, actions: list[ev.Action]) -> None:
        instance = self._sent.get(event.request_id)
        if instance is not None:
            instance.bounded(event.request_id, event.most_tokens)

    def _finished(self, event: ev.Finished, now: float, actions: list[ev.Action]) -> None:
        instance = self._sent.get(event.request_id)
        if instance is not None:
            instance.progress(event.request_id, event.output_tokens, now)
            self._leave(event.request_id, now)

    def _failed(self, event: ev.Failed, now: float, actions: list[ev.Action]) -> None:
        instance = self._sent.pop(event.request_id, None)
        sent = instance.remove(event.request_id) if instance is not None else None
        if instance is None or sent is None:
            return
        self._pacing.ended(instance, now)
        if not event.before_first_token:
            return
        request = sent.request
        request.attempts += 1
        lane = self._fleet.lane(request.model)
        figures: dict[str, Figure] = {"attempts": request.attempts, "error": event.error, "instance": instance.id}
        if request.attempts >= self.config.max_attempts:
            actions.append(refuse(request, "no_capacity", "engine_failed", 5.0, now, figures))
            return
        request.failed_on += (instance.id,)
        request.share_nothing()
        entry = Entry(request, lane.cost(request), now, request.avoid)
        entry.retry_at = now + RETRY_SAME_S
        if event.hold_s:
            entry.not_before = now + event.hold_s
        if entry.drop_at <= now:
            actions.append(ev.Drop(request, Decision("expire", "no_time_to_retry", request.id, now, figures)))
            return
        lane.queue.add(entry, now)

    def _leave(self, request_id: str, now: float) -> ShadowInstance | None:
        instance = self._sent.pop(request_id, None)
        if instance is not None:
            instance.remove(request_id)
            self._pacing.ended(instance, now)
        return instance

    def _draining(self, event: ev.InstanceDraining, now: float, actions: list[ev.Action]) -> None:
        self._fleet.handle(event)
        instance = self._fleet.instances.get(event.instance_id)
        if instance is not None:
            self._fleet.lane(instance.spec.model).keepers.left(instance)

    def _up(self, event: ev.InstanceUp, now: float, actions: list[ev.Action]) -> None:
        self._fleet.handle(event)

    def _expected(self, event: ev.Expected, now: float, actions: list[ev.Action]) -> None:
        actions += self._fleet.lane(event.model).expect(event, now)

    def _command(self, event: ev.Command, now: float, actions: list[ev.Action]) -> None:
        for lane in self._fleet.lanes.values():
            for request_id in event.request_ids:
                if event.kind == "cancel":
                    entry = lane.queue.remove(request_id)
                    if entry is not None:
                        figures: dict[str, Figure] = {"actor": event.actor, "command": event.id}
                        reason = "cancelled_by_operator"
                        actions.append(ev.Drop(entry.request, Decision("cancel", reason, request_id, now, figures)))
                elif event.kind == "reprioritise" and event.priority is not None:
                    lane.queue.reprioritise(request_id, event.priority, now)
                elif event.kind in ("pause", "resume"):
                    lane.queue.pause(request_id, event.kind == "pause", now)

    def _clock_offset(self, event: ev.ClockOffset, now: float, actions: list[ev.Action]) -> None:
        self._offset_s = event.seconds

    def _ordered(self, event: ev.Orders, now: float, actions: list[ev.Action]) -> None:
        actions += self.orders.take(event, self._queues(), now)

    def _queues(self) -> Iterator[RequestQueue]:
        return (lane.queue for lane in self._fleet.lanes.values())

    # ---- dispatching -----------------------------------------------------------------------------------------------

    def _run(self, lane: Lane, now: float, actions: list[ev.Action]) -> None:
        lane.advance(now)
        actions += lane.expire(now, late=True)
        actions += lane.screen(now)
        blocked: set[str] = set()
        while lane.queue.ready:
            able = [
                each
                for each in lane.instances.values()
                if each.takes and each.id not in blocked and self._pacing.ready(each, now)
            ]
            instance = self._routing.choose(lane.preferred(able, now), now) if able else None
            if not isinstance(instance, ShadowInstance):
                break
            if not self._fill(lane, instance, now, actions) or self._pacing.per_pass is None:
                blocked.add(instance.id)
            self._pacing.passed(instance, now)
        while not lane.queue.ready and lane.queue.hopeless and self._serve_hopeless(lane, now, actions):
            pass
        actions += lane.expire(now, late=False)  # only now: a request with a waiting time of 0 has this one chance

    def _fill(self, lane: Lane, instance: ShadowInstance, now: float, actions: list[ev.Action]) -> int:
        """Send what one pass chooses for one instance. Returns how many requests."""
        chosen, room = self._pass.choose(lane, instance, now)
        for entry, probability in chosen:
            self._send(lane, instance, entry, room, probability, now, actions)
        return len(chosen)

    def _send(
        self,
        lane: Lane,
        instance: ShadowInstance,
        entry: Entry,
        room: Room,
        probability: float,
        now: float,
        actions: list[ev.Action],
    ) -> None:
        request = entry.request
        copy = lane.queue.frames.sent(request.id, instance.id) if lane.queue.frames is not None else None
        lane.queue.remove(request.id)
        if instance.id != request.shared_at:
            request.share_nothing()
        lane.sent()
        slack = request.ttft_due - now
        rank = self._rank(request, entry.hopeless)
        figures: dict[str, Figure] = {
            "policy": self.name,
            "waited_s": now - request.arrival,
            "slack_s": slack,
            "probability": probability,
            "token_budget": room.tokens if math.isfinite(room.tokens) else None,
            "waiting_tokens": instance.waiting_tokens,
            "outstanding": instance.outstanding,
            "queued": len(lane.queue),
        }
        rejected: dict[str, Alternative] = {
            other.id: other.occupancy()
            for other in (lane.instances.values() if len(lane.instances) <= MOST_NAMED + 1 else ())
            if other is not instance
        }
        reason = "waited_for_tpot" if entry.waited_for_tpot else "fits_budget"
        if copy is not None:
            reason = _ranked(copy, figures, rejected)
        if entry.hopeless:
            reason = "pruned_spare_budget" if entry.pruned else "hopeless_spare_budget"
        self._serial += 1
        instance.send(request, now, rank, self._serial)
        expected_s = instance.waiting_prefill_s() + instance.decode_s()
        self._sent[request.id] = instance
        decision = Decision("dispatch", reason, request.id, now, figures, rejected)
        actions.append(ev.Send(request, instance.id, rank, slack, decision, expected_s))

    def _serve_hopeless(self, lane: Lane, now: float, actions: list[ev.Action]) -> bool:
        """No request that can make it waits, so the cheapest hopeless ones get spare room: one an instance and pass.

        Engines that select by value are sent them all, since a late answer may still be worth its time. Returns whether
        an instance may take more.
        """
        more, demand = False, recent_demand(lane, now)
        for instance in sorted(lane.instances.values(), key=lambda each: (each.outstanding, each.last_sent, each.id)):
            chooses = instance.spec.selects
            if not (instance.takes and self._pacing.ready(instance, now)):
                continue
            if not (chooses or self._pacing.spare(instance, demand, now)):
                continue
            entry = lane.cheapest_hopeless(instance, self.config.scan_limit, now)
            if entry is None:
                continue
            if not chooses and instance.free_tokens() <= entry.request.prompt_tokens and instance.outstanding:
                continue
            self._send(lane, instance, entry, Room(math.inf, 1, 0.0), 0.0, now, actions)
            more |= chooses
        return more

    def _rank(self, request: Request, hopeless: bool) -> int:
        """The rank the engine is given: lower is more urgent; milliseconds on the clock that gateways share."""
        kind = self.config.engine_rank
        if kind == "none":
            return 0
        rank = round(1000 * (request.targets.ttft_s if kind == "class" else request.ttft_due + self._offset_s))
        return rank + HOPELESS_RANK if hopeless else rank

    def _learning(self) -> list[Callable[[ev.Event, float], None]]:
        return [each.observe for each in (self._ordering, self._admission, self._routing) if learns(each)]

    def _ordering_chosen(self, event: ev.OrderingChosen, now: float, actions: list[ev.Action]) -> None:
        """Raises ConfigError for one that cannot be built: drivers check it first (`checked_ordering`)."""
        self._ordering = self._orderings(event.name, json.loads(event.options)) if event.name else self._own_ordering
        self._observers = self._learning()
        for lane in self._fleet.lanes.values():
            lane.queue.order_by(self._ordering, now)

    def _frames_learned(self, event: ev.FramesLearned, now: float, actions: list[ev.Action]) -> None:
        frames = self._fleet.lane(event.model).queue.frames
        if frames is not None and event.ordering == self._ordering.name:
            frames.restore(event.state, event.age_s, now)

    @property
    def ordering(self) -> str:
        """The name of the one in use."""
        return self._ordering.name

    def _new_lane(self) -> Lane:
        queue = RequestQueue(self._ordering, self._admission, self.journal)
        traffic, paces = (RecentTargets(self.config.traffic_window_s, self.config.tightest_share) for _ in range(2))
        screening: Any = self._admission if hasattr(self._admission, "screen") else None
        return Lane(queue, traffic, paces, Keepers(self.config.traffic_window_s), screening)

    def _wake(self, lane: Lane, now: float) -> float:
        if not len(lane.queue):
            return math.inf
        instances = min(
            (self._pacing.wake_at(each, now) for each in lane.instances.values() if each.takes), default=math.inf
        )
        go_on = now + GO_ON_S if lane.queue.outdated or lane.queue.untold else math.inf
        # Once it is ranked again, a request may be late where it waited for room, and go where there is some.
        # A frame that is over already waits for an instance.
        ends = math.inf if lane.queue.frames is None else lane.queue.frames.ends
        frame = ends if ends > now else math.inf
        return min(instances, lane.queue.next_turn(), lane.again_at, go_on, frame)


def _ranked(copy: Copy, figures: dict[str, Figure], rejected: dict[str, Alternative]) -> str:
    """Note what spoke for this instance, and what for the others. Returns the reason."""
    figures |= {"goodput_rate": copy.goodput_rate, "frame": copy.frame, "cutoff": copy.cutoff}
    for name, goodput_rate in copy.others.items():
        known = rejected.get(name)
        if isinstance(known, Mapping):
            rejected[name] = {**known, "goodput_rate": goodput_rate}
    if copy.tier == "late":
        return "late_everywhere"
    return "goodput_window" if copy.tier == "window" else "goodput_first"
