"""The scheduler: one state machine over the dispatcher (collocated and prefill) and the migrator (decode), without I/O.

Drivers hand it what happened, in batches with one `now`, perform the actions that it answers, and call it again when
something happens or `wake_at` has come. The gateway (api.openai.runtime) and the simulator (controller.simulator) are
such drivers; everything that they would otherwise decide is decided here:

- which instances prefill, decode or do both, and that the dispatcher does not see those that only decode;
- what part of a request an instance is sent, and what the migrator is told of it (`PrefillSent`);
- what the end of one stage means for the other, also where both run at once (overlap, pairs);
- how often a request may be prefilled, and where it goes when it has to begin again;
- which of two wake-ups comes first;
- that nothing is lost when a policy raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.snapshot import FleetState
from controller.core.types import Part, Role
from controller.dispatch.disaggregation.link_book import LinkView
from controller.dispatch.disaggregation.migrator import Migrator
from controller.dispatch.dispatcher import StageDispatcher
from controller.dispatch.lifecycle import MAX_PREFILLS, TWO_STAGES, On, OpenRequest, State
from controller.dispatch.queue import QueueView

SHORTEST_WAKE_S = 0.0005  # a wake-up in the past must not spin
AFTER_FAILURE_S = 0.1  # next try of a policy that raised

OF_INSTANCES = frozenset({ev.InstanceUp, ev.InstanceDown, ev.InstanceDraining, ev.SharesChanged, ev.Telemetry})
ENDS_OF_STAGES = frozenset({ev.PrefillFailed, ev.TransferFailed, ev.AnsweredWhole})

Defect = Callable[[str, Sequence[ev.Event], Exception], None]


class Heard:
    """One batch, sorted out: what the dispatcher is told, what is news for the migrator, what the driver is to do
    whatever these two say, and which requests are to be prefilled again."""

    __slots__ = ("actions", "again", "news", "told")

    def __init__(self) -> None:
        self.told: list[ev.Event] = []
        self.news: list[ev.Event] = []
        self.actions: list[ev.Action] = []
        self.again: list[ev.Action] = []


class Scheduler:
    """`migrator`: without one, the roles of instances mean nothing. `defect`: told who raised on which events; the rest
    of the batch is rescued, and every request it concerns goes on or is answered. None: exceptions are the caller's.
    """

    def __init__(
        self, dispatcher: StageDispatcher, migrator: Migrator | None = None, defect: Defect | None = None
    ) -> None:
        self.name = dispatcher.name
        self.dispatcher = dispatcher
        self.migrator = migrator
        self._defect = defect
        self._open: dict[str, OpenRequest] = {}
        self._roles: dict[str, Role] = {}  # of instances that only prefill or only decode
        self._stages = False  # there are roles, or there were and the migrator has not finished
        self._paired: set[str] = set()
        self._now = 0.0
        self._dispatch_at = math.inf
        self._migrate_at = math.inf
        self._hears: dict[type, Callable[[Any], ev.Event | None]] = {
            ev.Arrived: self._arrived,
            ev.Cancelled: self._ended,
            ev.Finished: self._ended,
            ev.FirstToken: self._first_token,
            ev.Failed: self._failed,
            ev.PrefillEnding: self._prefill_ending,
            ev.PrefillDone: self._prefill_done,
            ev.TransferStarted: self._transfer_started,
            ev.TransferMoves: self._transfer_moves,
            ev.TransferDone: self._transfer_done,
            ev.KvReleased: self._kv_released,
            ev.LinkSeen: _not_for_dispatcher,
            ev.Woke: _not_for_dispatcher,
            ev.InstanceUp: self._instance_up,
            ev.InstanceDown: self._instance_down,
        }

    # ---- the driver's side -----------------------------------------------------------------------------------------

    def handle(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """Take in what happened, then decide what follows. `now` never goes backwards."""
        now = self._now = max(now, self._now)
        heard = self._hear(events, now)
        actions = heard.actions
        if now >= self._dispatch_at:
            heard.told.append(ev.Woke())
        if heard.told:
            actions += self._dispatch(heard.told, now)
        if self.migrator is not None:
            if self.disaggregated:
                self._migrate(self.migrator, heard, actions, now)
            elif not OF_INSTANCES.isdisjoint(map(type, heard.news)):
                # It has to know all instances when some have roles again.
                heard.news = [event for event in heard.news if type(event) in OF_INSTANCES]
                self._migrate(self.migrator, heard, actions, now)
        wake_at = min(self._dispatch_at, self._migrate_at)
        return ev.Reply(actions, None if math.isinf(wake_at) else wake_at)

    @property
    def disaggregated(self) -> bool:
        """Are there instances that only prefill or decode, or requests that began while there were?"""
        if not self._roles and self._stages:  # where there never were any, the migrator is not asked at each pass
            self._stages = self.migrator is not None and self.migrator.busy
        return bool(self._roles) or self._stages

    @property
    def roles(self) -> Mapping[str, Role]:
        """Of the instances that only prefill or only decode."""
        return self._roles

    def state_of(self, request_id: str) -> State:
        found = self._open.get(request_id)
        return State.ENDED if found is None else found.state

    def fleet(self, now: float) -> list[FleetState]:
        """All instances as they are believed to be."""
        decode = self.migrator.fleet(now) if self.migrator is not None else []
        return [*self.dispatcher.fleet(now), *decode]

    def queue(self) -> QueueView:
        """Requests that wait to be sent."""
        return self.dispatcher.queue()

    def pending_above(self, priority: int) -> bool:
        return self.dispatcher.pending_above(priority)

    def decode_pressure(self, now: float) -> dict[str, tuple[int, float]]:
        """By model: how many wait for a decode instance, and their largest wait since the first token over TPOT."""
        return {} if self.migrator is None else self.migrator.pressure(now)

    def links(self, now: float) -> list[LinkView]:
        """Between prefill and decode instances, as they are believed to be."""
        return [] if self.migrator is None else self.migrator.links.views(now)

    # ---- what is heard ---------------------------------------------------------------------------------------------

    def _hear(self, events: Sequence[ev.Event], now: float) -> Heard:
        """Follow each request through the table, and sort out who is to hear what."""
        heard = Heard()
        told, news, hears = heard.told, heard.news, self._hears
        for event in events:
            kind = type(event)
            if kind in ENDS_OF_STAGES:
                self._stage_ended(event, heard, now)
                continue
            hear = hears.get(kind)
            for_dispatcher = event if hear is None else hear(event)
            if for_dispatcher is not None:
                told.append(for_dispatcher)
            news.append(event)
        return heard

    def _stage_ended(self, event: ev.Event, heard: Heard, now: float) -> None:
        """What the end of one stage means depends on how far the other is."""
        if isinstance(event, ev.PrefillFailed):
            self._prefill_failed(event, heard)
        elif isinstance(event, ev.TransferFailed):
            self._transfer_failed(event, heard, now)
        elif isinstance(event, ev.AnsweredWhole):
            # The migrator forgets it, and a decode stage that waits for its KV is aborted.
            self._follow(event.request_id, On.ANSWERED_WHOLE)
            heard.news.append(ev.Cancelled(event.request_id))

    def _arrived(self, event: ev.Arrived) -> ev.Event:
        self._open[event.request.id] = OpenRequest(event.request)
        return event

    def _ended(self, event: ev.Finished | ev.Cancelled) -> ev.Event:
        self._open.pop(event.request_id, None)
        return event

    def _first_token(self, event: ev.FirstToken) -> ev.Event:
        found = self._open.get(event.request_id)
        if found is not None:
            found.follow(On.FIRST_TOKEN)
        return event

    def _failed(self, event: ev.Failed) -> ev.Event:
        if not event.before_first_token:
            self._open.pop(event.request_id, None)
        elif self.dispatcher.holds(event.request_id):  # else it is late news of an attempt that is over
            self._follow(event.request_id, On.FAILED)
        return event

    def _prefill_ending(self, event: ev.PrefillEnding) -> ev.Event | None:
        found = self._open.get(event.request_id)
        overlaps = self.migrator is not None and self.migrator.config.overlap
        if found is not None and overlaps and found.source == event.instance_id:
            found.follow(On.PREFILL_ENDING)
        return event

    def _prefill_done(self, event: ev.PrefillDone) -> ev.Event:
        self._follow(event.request.id, On.PREFILL_DONE)
        return event

    def _prefill_failed(self, event: ev.PrefillFailed, heard: Heard) -> None:
        """A decode stage whose engine has said that all KV is there needs nothing else of its prefill, and goes on."""
        name = event.request_id
        found = self._open.get(name)
        means: ev.Event
        if found is not None and found.landed:
            means = self._prefill_done(ev.PrefillDone(found.request, event.instance_id, found.request.prompt_tokens))
        else:
            if found is not None and found.target:
                heard.actions.append(ev.Abort(name, found.target, "prefill_failed"))
            means = self._failed(ev.Failed(name, True, event.error))
        heard.told.append(means)
        heard.news.append(means)

    def _transfer_failed(self, event: ev.TransferFailed, heard: Heard, now: float) -> None:
        """The migrator looks for another decode instance, unless the KV had been taken: then it is nowhere any more."""
        name = event.request_id
        found = self._open.get(name)
        if found is None or found.target != event.instance_id:
            heard.news.append(event)
            return
        gone = found.landed or (found.paired and not self.dispatcher.holds(name))
        found.follow(On.UNDONE)
        found.target = ""
        if not gone:
            heard.news.append(event)
            return
        heard.news.append(ev.Failed(name, True, event.reason))
        figures: dict[str, Figure] = {"instance": event.instance_id, "error": event.reason}
        heard.again.append(ev.PrefillAgain(found.request, Decision("place", "decode_failed", name, now, figures)))

    def _transfer_started(self, event: ev.TransferStarted) -> None:
        self._decodes(event.request_id, event.instance_id, On.MOVES if event.moves else On.STARTED)

    def _transfer_moves(self, event: ev.TransferMoves) -> None:
        self._decodes(event.request_id, event.instance_id, On.MOVES)

    def _transfer_done(self, event: ev.TransferDone) -> None:
        found = self._decodes(event.request_id, event.instance_id, On.DONE)
        if found is not None:
            found.landed = not event.assumed
            if event.released:
                found.follow(On.RELEASED)

    def _kv_released(self, event: ev.KvReleased) -> None:
        found = self._open.get(event.request_id)
        if found is not None and event.known and found.source == event.instance_id:
            found.follow(On.RELEASED)

    def _decodes(self, request_id: str, instance_id: str, on: str) -> OpenRequest | None:
        """News of a decode stage. None: of one that was undone meanwhile, or is further on already."""
        found = self._open.get(request_id)
        return found if found is not None and found.target == instance_id and found.follow(on) else None

    def _follow(self, request_id: str, on: str) -> None:
        found = self._open.get(request_id)
        if found is not None and found.follow(on) and found.state is State.QUEUED:
            found.source = found.target = ""
            found.landed = found.paired = False

    def _instance_up(self, event: ev.InstanceUp) -> ev.Event | None:
        """Decode instances are the migrator's: one that becomes one is gone for the dispatcher."""
        name, role = event.spec.id, event.spec.role
        if self.migrator is None:
            return event
        self._paired.discard(name)
        if event.paired:
            self._paired.add(name)
        if role is Role.COLLOCATED:
            self._roles.pop(name, None)
            return event
        before, self._roles[name], self._stages = self._roles.get(name), role, True
        if role is Role.PREFILL:
            return event
        return None if before is Role.DECODE else ev.InstanceDown(name)

    def _instance_down(self, event: ev.InstanceDown) -> ev.Event:
        self._roles.pop(event.instance_id, None)
        self._paired.discard(event.instance_id)
        return event

    # ---- sending ---------------------------------------------------------------------------------------------------

    def _dispatch(self, events: Sequence[ev.Event], now: float) -> list[ev.Action]:
        """Let the dispatcher decide, and follow what it did."""
        try:
            reply = self.dispatcher.handle(events, now)
        except Exception as error:  # a bug in a policy must not leave clients waiting for ever
            if self._defect is None:
                raise
            self._defect("dispatcher", events, error)
            reply = self._salvage(events, now)
        self._dispatch_at = math.inf if reply.wake_at is None else max(reply.wake_at, now + SHORTEST_WAKE_S)
        actions = reply.actions
        for index, action in enumerate(actions):
            if type(action) is ev.Send:
                send = actions[index] = self._with_part(action) if self._roles else action
                self._sent(send)
            elif type(action) is ev.Refuse or type(action) is ev.Drop:
                self._open.pop(action.request.id, None)
        return actions

    def _with_part(self, send: ev.Send) -> ev.Send:
        """Of a request for one token nothing is left for another engine, but in pairs."""
        if self._roles.get(send.instance_id) is not Role.PREFILL:
            return send
        if send.instance_id in self._paired:
            return send._replace(part=Part.PAIR)
        return send if send.request.max_tokens == 1 else send._replace(part=Part.PREFILL)

    def _sent(self, send: ev.Send) -> None:
        found = self._open.get(send.request.id)
        if found is None:
            return
        found.source = send.instance_id
        if send.part is Part.WHOLE:
            found.follow(On.SEND)
        else:
            found.paired = send.part is Part.PAIR
            found.follow(On.SEND_PAIR if found.paired else On.SEND_PREFILL)

    # ---- decode stages ---------------------------------------------------------------------------------------------

    def _migrate(self, migrator: Migrator, heard: Heard, actions: list[ev.Action], now: float) -> None:
        """Let the migrator decide; what it sends back to the queue the dispatcher may send at once."""
        begun = [*heard.news, *_prefills(actions)]
        while True:
            decided, failed = self._decide(migrator, begun, now)
            told: list[ev.Event] = []
            for action in (*heard.again, *decided):
                self._take_up(action, actions, told)
            heard.again = []
            if failed:
                self._rescue(migrator, actions, told, now)
            if not told:
                return
            sent = self._dispatch(told, now)
            actions += sent
            begun = _prefills(sent)
            if not begun:
                return

    def _decide(self, migrator: Migrator, events: Sequence[ev.Event], now: float) -> tuple[list[ev.Action], bool]:
        """And whether it raised."""
        failed = False
        try:
            reply = migrator.handle(events, now)
        except Exception as error:  # a bug in a placement must neither lose what happened nor leave clients waiting
            if self._defect is None:
                raise
            self._defect("migrator", events, error)
            reply, failed = self._salvage_stages(migrator, events, now), True
        self._migrate_at = math.inf if reply.wake_at is None else max(reply.wake_at, now + SHORTEST_WAKE_S)
        return reply.actions, failed

    def _take_up(self, action: ev.Action, actions: list[ev.Action], told: list[ev.Event]) -> None:
        """One action of the migrator: what the driver is to do, and what the dispatcher is to hear (`told`)."""
        if isinstance(action, ev.FreeKv | ev.LeftToLease):
            actions.append(action)
            return
        name = action.request_id if isinstance(action, ev.Abort) else action.request.id
        found = self._open.get(name)
        if isinstance(action, ev.PrefillAgain):
            if found is not None and found.state in TWO_STAGES:  # else it failed in the same moment, and is queued
                self._prefill_again(found, action, actions, told)
            return
        if isinstance(action, ev.GiveUp):
            if found is not None and found.state in TWO_STAGES:
                self._give_up(action, actions, told)
            return
        if found is not None and isinstance(action, ev.Place) and found.follow(On.PLACE):
            found.target, found.landed = action.target, False
        elif found is not None and isinstance(action, ev.Abort) and found.target == action.instance_id:
            found.follow(On.UNDONE)
            found.target = ""
        actions.append(action)

    def _prefill_again(
        self, found: OpenRequest, action: ev.PrefillAgain, actions: list[ev.Action], told: list[ev.Event]
    ) -> None:
        """Its prefill goes, where it still runs, and the request is queued again: not without end."""
        request = found.request
        runs = self.dispatcher.holds(request.id)
        pair, reason = found.paired and runs, action.decision.reason
        self._follow(request.id, On.PREFILL_AGAIN)
        if pair:  # nothing of it was computed in vain: it is queued as after any failure of its prefill instance
            actions.append(action)
            told.append(ev.Failed(request.id, True, reason))
            return
        if runs:
            told.append(ev.Failed(request.id, False, reason))
        request.attempts += action.counts
        if request.attempts >= MAX_PREFILLS:
            self._open.pop(request.id, None)
            actions.append(ev.GiveUp(request, action.decision, prefilled=True))
            return
        actions.append(action)
        told.append(ev.Arrived(request, action.avoid))

    def _give_up(self, action: ev.GiveUp, actions: list[ev.Action], told: list[ev.Event]) -> None:
        name = action.request.id
        self._open.pop(name, None)
        actions.append(action)
        if self.dispatcher.holds(name):  # its prefill has not ended
            told.append(ev.Cancelled(name))

    # ---- when a policy raises --------------------------------------------------------------------------------------

    def _salvage(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """What happened must not be lost with the pass: told again, one by one. What waits nowhere then is answered.

        Events are safe to hear twice. Arrivals are not: those that did not get into the queue end here, as do requests
        whose Send was lost with the failed pass.
        """
        actions: list[ev.Action] = []
        for event in events:
            if not isinstance(event, ev.Arrived):
                actions += self._once_more(event, now)
        decided = {action.request.id for action in actions if isinstance(action, ev.Send | ev.Refuse | ev.Drop)}
        for name, found in list(self._open.items()):
            if found.state is State.QUEUED and name not in decided and not self.dispatcher.waiting(name):
                del self._open[name]
                self._once_more(ev.Cancelled(name), now)
                actions.append(ev.Unscheduled(found.request))
        return ev.Reply(actions, now + AFTER_FAILURE_S)

    def _once_more(self, event: ev.Event, now: float) -> list[ev.Action]:
        try:
            return self.dispatcher.handle([event], now).actions
        except Exception as error:  # this event is the one it fails on: the others are not to suffer
            self._complain("dispatcher", event, error)
            return []

    def _salvage_stages(self, migrator: Migrator, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """The same: the migrator may hear any event twice. A Place that was lost meets its time-out."""
        actions: list[ev.Action] = []
        for event in events:
            try:
                actions += migrator.handle([event], now).actions
            except Exception as error:
                self._complain("migrator", event, error)
        return ev.Reply(actions, now + AFTER_FAILURE_S)

    def _complain(self, who: str, event: ev.Event, error: Exception) -> None:
        if self._defect is not None:
            self._defect(who, [event], error)

    def _rescue(self, migrator: Migrator, actions: list[ev.Action], told: list[ev.Event], now: float) -> None:
        """Prefilled requests that the migrator has lost begin again."""
        for name, found in list(self._open.items()):
            lost = found.state is State.WAITING and migrator.state_of(name) is None
            if lost and not self.dispatcher.holds(name):
                decision = Decision("place", "migrator_failed", name, now, {"instance": found.source})
                self._prefill_again(found, ev.PrefillAgain(found.request, decision), actions, told)


def _prefills(actions: Sequence[ev.Action]) -> list[ev.Event]:
    """What the migrator is to know of those: which requests were sent to be decoded elsewhere."""
    return [
        ev.PrefillSent(action.request, action.instance_id, action.part is Part.PAIR, action.prefill_s)
        for action in actions
        if type(action) is ev.Send and action.part is not Part.WHOLE
    ]


def _not_for_dispatcher(event: ev.Event) -> None:
    """Nothing that it decides depends on it."""
