"""The scheduler: one state machine over the dispatcher (collocated and prefill) and the migrator (decode), without I/O.

A driver passes in events in batches that share one `now`, performs the actions that `handle` returns, and calls
`handle` again when something happens or when `wake_at` is reached. The gateway (api.openai.runtime) and the simulator
(controller.simulator) are the two drivers. The scheduler decides everything that they would otherwise decide twice:

- which instances prefill, decode or do both; the dispatcher never sees an instance that only decodes;
- which part of a request an instance receives, and what the migrator learns about it (`PrefillSent`);
- what the end of one stage means for the other, also when both run at once (overlap, pairs);
- how often a request may be prefilled, and where it goes when it starts again;
- which request is at fault when engines die, and that it fails (`Suspects`);
- which of the two wake-ups comes first;
- that no request is lost when a policy raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from controller.core import events as ev
from controller.core.decisions import Decision
from controller.core.snapshot import FleetState
from controller.core.types import Part, Request, Role
from controller.dispatch.disaggregation.link_book import LinkView
from controller.dispatch.disaggregation.migrator import Migrator
from controller.dispatch.dispatcher import StageDispatcher
from controller.dispatch.lifecycle import MAX_PREFILLS, TWO_STAGES, UNDER_WAY, On, OpenRequest, State
from controller.dispatch.queue import QueueView
from controller.dispatch.suspects import HOLD_S, Present, Suspects

SHORTEST_WAKE_S = 0.0005  # a wake-up in the past must not spin
AFTER_FAILURE_S = 0.1  # next try of a policy that raised: soon enough for TTFT, rare enough not to flood the log

# Of the fleet, whatever the roles of its instances are.
FLEET_EVENTS = frozenset(
    {ev.InstanceUp, ev.InstanceDown, ev.InstanceDraining, ev.SharesChanged, ev.Telemetry, ev.ClockOffset}
)
STAGE_ENDS = frozenset({ev.EngineFailed, ev.TransferFailed, ev.AnsweredWhole})

Defect = Callable[[str, Sequence[ev.Event], Exception], None]


class SortedEvents:
    """One batch of events, sorted by who needs them. `actions`: what the driver does in any case."""

    __slots__ = ("actions", "for_dispatcher", "for_migrator")

    def __init__(self) -> None:
        self.for_dispatcher: list[ev.Event] = []
        self.for_migrator: list[ev.Event] = []
        self.actions: list[ev.Action] = []

    def both(self, event: ev.Event) -> None:
        self.for_dispatcher.append(event)
        self.for_migrator.append(event)


class Scheduler:
    """`migrator`: None ignores the roles of instances. `defect`: called with the part that raised ("dispatcher" or
    "migrator"), the events and the exception; the rest of the batch is then handled, and every request in it goes on or
    is answered. Without `defect`, the exception reaches the caller.
    """

    def __init__(
        self, dispatcher: StageDispatcher, migrator: Migrator | None = None, defect: Defect | None = None
    ) -> None:
        self.name = dispatcher.name
        self.dispatcher = dispatcher
        self.migrator = migrator
        self._defect = defect
        self.suspects = Suspects(dispatcher.config.most_engines_ended, dispatcher.config.quarantine_s)
        self._open: dict[str, OpenRequest] = {}
        self._roles: dict[str, Role] = {}  # of instances that only prefill or only decode
        self._stages = False  # there are roles, or there were and the migrator has not finished
        self._paired: set[str] = set()
        self._delays: list[ev.Event] = []  # what the migrator found out, for the dispatcher's next pass
        self._now = 0.0
        self._dispatch_at = math.inf
        self._migrate_at = math.inf
        self._followers: dict[type, Callable[[Any], ev.Event | None]] = {
            ev.Arrived: self._arrived,
            ev.Cancelled: self._cancelled,
            ev.Finished: self._finished,
            ev.FirstToken: self._first_token,
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
            ev.Telemetry: self._telemetry,
        }

    # ---- the driver's side -----------------------------------------------------------------------------------------

    def handle(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """Apply the events, then decide. `now`: seconds on the driver's clock; an earlier one counts as the last."""
        now = self._now = max(now, self._now)
        batch = self._sort(events)
        if self._delays and batch.for_dispatcher:
            batch.for_dispatcher[:0], self._delays = self._delays, []
        actions = batch.actions
        if now >= self._dispatch_at:
            batch.for_dispatcher.append(ev.Woke())
        if batch.for_dispatcher:
            actions += self._dispatch(batch.for_dispatcher, now)
        if self.migrator is not None:
            if self.disaggregated:
                self._migrate(self.migrator, batch, actions, now)
                self._delays += self.migrator.first_bytes.news(now)
            elif not FLEET_EVENTS.isdisjoint(map(type, events)):
                # The migrator keeps track of all instances, so that it knows them when some have roles again.
                batch.for_migrator = [event for event in batch.for_migrator if type(event) in FLEET_EVENTS]
                self._migrate(self.migrator, batch, actions, now)
        wake_at = min(self._dispatch_at, self._migrate_at)
        return ev.Reply(actions, None if math.isinf(wake_at) else wake_at)

    @property
    def disaggregated(self) -> bool:
        """True while an instance only prefills or only decodes, and until all requests from that time have ended."""
        if not self._roles and self._stages:  # a fleet that was always collocated skips the migrator in each pass
            self._stages = self.migrator is not None and self.migrator.busy
        return bool(self._roles) or self._stages

    @property
    def roles(self) -> Mapping[str, Role]:
        """Roles by instance id, of the instances that only prefill or only decode."""
        return self._roles

    def state_of(self, request_id: str) -> State:
        found = self._open.get(request_id)
        return State.ENDED if found is None else found.state

    def learned_state(self) -> dict[str, dict[str, Any]]:
        """All that was learned of instances, for another process (`InstanceUp.learned`)."""
        return (self.migrator.learned_state() if self.migrator else {}) | self.dispatcher.learned_state()

    def fleet(self, now: float) -> list[FleetState]:
        """All instances, in the state in which the scheduler believes they are."""
        if self.migrator is None:
            return self.dispatcher.fleet(now)
        states = [*self.dispatcher.fleet(now), *self.migrator.fleet(now)]
        kept = self.migrator.kept_kv()
        if kept:
            for state in states:
                state.kept_kv = kept[state.id]
        return states

    def wanted(self, now: float) -> set[str]:
        """Ids of instances that left and keep targets of recent requests that none keeps which serves."""
        return self.dispatcher.wanted(now) | (self.migrator.wanted(now) if self.migrator else set())

    def queue(self) -> QueueView:
        """The requests that wait for an instance."""
        return self.dispatcher.queue()

    def pending_above(self, priority: int) -> bool:
        return self.dispatcher.pending_above(priority)

    def decode_pressure(self, now: float) -> dict[str, tuple[int, float]]:
        """By model: requests that wait for a decode instance, and the longest wait over what was left of its TTFT."""
        return {} if self.migrator is None else self.migrator.pressure(now)

    def links(self, now: float) -> list[LinkView]:
        """The links between prefill and decode instances, in the state in which the migrator believes they are."""
        return [] if self.migrator is None else self.migrator.links.views(now)

    # ---- events ----------------------------------------------------------------------------------------------------

    def _sort(self, events: Sequence[ev.Event]) -> SortedEvents:
        """Follow each request through the table of states, and sort the events by who needs them."""
        batch = SortedEvents()
        for_dispatcher, for_migrator, followers = batch.for_dispatcher, batch.for_migrator, self._followers
        for event in events:
            kind = type(event)
            if kind is ev.InstanceDown and event.died:  # type: ignore[union-attr]
                self._instance_died(event.instance_id, batch)  # type: ignore[union-attr]
            if kind is ev.Arrived and self.suspects.quarantine and self._quarantined(event.request, batch):  # type: ignore[union-attr]
                continue
            if kind in STAGE_ENDS:
                self._stage_ended(event, batch)
                continue
            follow = followers.get(kind)
            passed_on = event if follow is None else follow(event)
            if passed_on is not None:
                for_dispatcher.append(passed_on)
            for_migrator.append(event)
        return batch

    def _stage_ended(self, event: ev.Event, batch: SortedEvents) -> None:
        """What the end of one stage means depends on the state of the other."""
        if isinstance(event, ev.EngineFailed):
            self._engine_failed(event, batch)
        elif isinstance(event, ev.TransferFailed):
            self._transfer_failed(event, batch)
        elif isinstance(event, ev.AnsweredWhole):
            self._answered_whole(event, batch)

    def _arrived(self, event: ev.Arrived) -> ev.Event:
        self._open[event.request.id] = OpenRequest(event.request)
        return event

    def _finished(self, event: ev.Finished) -> ev.Event:
        found = self._open.get(event.request_id)
        queued = found is not None and found.state is State.QUEUED
        self._close(event.request_id, On.FINISHED)
        # Its prefill failed in this batch, beside an answer that was whole already: it must not be sent once more.
        return ev.Cancelled(event.request_id) if queued else event

    def _cancelled(self, event: ev.Cancelled) -> ev.Event:
        self._close(event.request_id, On.CANCELLED)
        return event

    def _close(self, request_id: str, on: str) -> None:
        """End the request for this cause. It ends whatever the table says, since its client is not waiting any more."""
        found = self._open.pop(request_id, None)
        if found is None:
            return
        before = found.state
        if not found.follow(on) or found.state is not State.ENDED:
            error = RuntimeError(f"{on} does not end a request that is {before}")
            if self._defect is None:
                raise error
            self._defect("scheduler", [], error)

    def _first_token(self, event: ev.FirstToken) -> ev.Event:
        found = self._open.get(event.request_id)
        if found is not None and not event.assumed:
            found.answering = True
            found.follow(On.FIRST_TOKEN)
        return event

    def _prefill_ending(self, event: ev.PrefillEnding) -> ev.Event | None:
        found = self._open.get(event.request_id)
        if found is not None and self.migrator is not None and self.migrator.overlaps(event):
            found.follow(On.PREFILL_ENDING)
        return event

    def _prefill_done(self, event: ev.PrefillDone) -> ev.Event:
        self._follow(event.request.id, On.PREFILL_DONE)
        return event

    def _engine_failed(self, event: ev.EngineFailed, batch: SortedEvents) -> None:
        """What a failed call means depends on the stage that it served and on how far the request had got."""
        name, found = event.request_id, self._open.get(event.request_id)
        if found is None or found.state is State.QUEUED or event.instance_id not in (found.source, found.target):
            return  # stale: it has ended, was queued again or went elsewhere in this batch
        decodes = event.instance_id == found.target
        # The order of these checks matters: KV that has arrived comes first, since nothing is lost then; a token at the
        # client comes before whose fault it is, since the client can only be told in its stream from then on.
        if found.landed and not decodes:  # the decode stage has all KV and goes on without its prefill instance
            prompt_tokens = found.request.prompt_tokens
            batch.both(self._prefill_done(ev.PrefillDone(found.request, event.instance_id, prompt_tokens)))
        elif found.answering or event.at_fault == "answer":
            on = On.CUT if found.answering else On.UNREADABLE
            self._fail(found, on, ev.Failed(name, False, event.error), batch)
        elif event.at_fault == "request" or (event.at_fault == "kv" and (found.paired or not decodes)):
            self._fail(found, On.REJECTED, ev.Cancelled(name), batch)
        elif (guilty := self._at_fault(found, event)) and (
            decodes or self.suspects.certain(event.instance_id, self._now)
        ):
            self._convict(found, batch)
        elif decodes:
            self._transfer_failed(ev.TransferFailed(name, event.instance_id, event.reason), batch)
        elif event.at_fault != "instance" or found.state in (State.SENT, State.PREFILLING):
            self._retry(found, event, batch, HOLD_S if guilty else 0.0)
        # else its KV was offered already, and the migrator decides at InstanceDown

    def _fail(self, found: OpenRequest, on: str, means: ev.Event, batch: SortedEvents) -> None:
        self._close(found.request.id, on)
        batch.actions.append(ev.Fail(found.request, rejected=on == On.REJECTED))
        batch.both(means)

    def _at_fault(self, found: OpenRequest, event: ev.EngineFailed) -> bool:
        """Whether the request is what ended this engine, after others. Its engine may have died, or lost the call."""
        name = event.instance_id
        died = event.connection == "lost" or (event.at_fault == "instance" and self.suspects.certain(name, self._now))
        if not died or self.dispatcher.draining(name) or not _computed_by(found, name):
            return False
        return self.suspects.lost(found.request, name, lambda: self._present(name), self._now)

    def _present(self, instance_id: str) -> list[Present]:
        """The requests at an instance whose clients have no token. Where it decodes, those that were at a death before
        count as computed: nobody keeps them apart there."""
        there = [found for found in self._open.values() if not found.answering and _computed_by(found, instance_id)]
        return [
            Present(
                found.request,
                bool(found.request.ended)
                if found.target == instance_id
                else self.dispatcher.computing(found.request.id),
            )
            for found in there
        ]

    def _instance_died(self, instance_id: str, batch: SortedEvents) -> None:
        if self.dispatcher.draining(instance_id):  # somebody stops it
            return
        for request in self.suspects.down(instance_id, lambda: self._present(instance_id), self._now):
            found = self._open.get(request.id)
            if found is not None and not found.answering:
                self._convict(found, batch)

    def _convict(self, found: OpenRequest, batch: SortedEvents) -> None:
        self._close(found.request.id, On.ENDS_ENGINES)
        batch.actions.append(self.suspects.convict(found.request, self._now))
        batch.both(ev.Cancelled(found.request.id))

    def _quarantined(self, request: Request, batch: SortedEvents) -> bool:
        refusal = self.suspects.refusal(request, self._now)
        if refusal is not None:
            batch.actions.append(refusal)
        return refusal is not None

    def _telemetry(self, event: ev.Telemetry) -> ev.Event:
        if self.suspects.deaths:
            self.suspects.alive(event.instance_id, event.load.observed_at)
        return event

    def _retry(self, found: OpenRequest, event: ev.EngineFailed, batch: SortedEvents, hold_s: float) -> None:
        """Back to the queue. A decode stage that waits for the rest of its KV ends with its prefill. `hold_s`: until it
        is known whether its engine died."""
        name = found.request.id
        if event.at_fault == "engine" and event.connection == "kept":
            hold_s = self.suspects.failed(found.request, event.instance_id, self._now)
        if found.target:
            batch.actions.append(ev.Abort(name, found.target, "prefill_failed"))
        self._follow(name, On.FAILED)
        batch.actions.append(ev.Retry(found.request))
        batch.both(ev.Failed(name, True, event.error, hold_s))

    def _answered_whole(self, event: ev.AnsweredWhole, batch: SortedEvents) -> None:
        found = self._open.get(event.request_id)
        if found is not None and found.follow(On.ANSWERED_WHOLE):
            found.target = ""
            found.landed = found.paired = False  # of a decode stage that is not needed any more
            batch.actions.append(ev.AnswerThere(found.request, event.instance_id))
            # The migrator drops the request and aborts a decode stage that waits for its KV.
            batch.for_migrator.append(ev.Cancelled(event.request_id))

    def _transfer_failed(self, event: ev.TransferFailed, batch: SortedEvents) -> None:
        """The migrator judges whether the KV is lost; until it has placed the stage again, it has no target."""
        found = self._open.get(event.request_id)
        if found is not None and found.target == event.instance_id:
            found.follow(On.UNDONE)
            found.target = ""
        batch.for_migrator.append(event)

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
        """Follow an event of a decode stage. None if it is stale: rolled back meanwhile, or further on already."""
        found = self._open.get(request_id)
        return found if found is not None and found.target == instance_id and found.follow(on) else None

    def _follow(self, request_id: str, on: str) -> None:
        found = self._open.get(request_id)
        if found is not None and found.follow(on) and found.state is State.QUEUED:
            found.source = found.target = ""
            found.landed = found.paired = False

    def _instance_up(self, event: ev.InstanceUp) -> ev.Event | None:
        """An instance that becomes a decode instance goes down for the dispatcher; the migrator has it from then on."""
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
        for found in self._open.values():  # the migrator places these again when it hears of it
            if found.target == event.instance_id and found.state in UNDER_WAY:
                found.follow(On.UNDONE)
                found.target = ""
        return event

    # ---- sending ---------------------------------------------------------------------------------------------------

    def _dispatch(self, events: Sequence[ev.Event], now: float) -> list[ev.Action]:
        """Let the dispatcher decide, and follow its actions through the table of states."""
        try:
            reply = self.dispatcher.handle(events, now)
        except Exception as error:  # a bug in a policy must not leave clients waiting forever
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
            elif type(action) is ev.Refuse:
                self._close(action.request.id, On.REFUSE)
            elif type(action) is ev.Drop:
                self._close(action.request.id, On.DROP)
        return actions

    def _with_part(self, send: ev.Send) -> ev.Send:
        """A request for one token has no decode stage, except in pairs, whose two stages begin together."""
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

    def _migrate(self, migrator: Migrator, batch: SortedEvents, actions: list[ev.Action], now: float) -> None:
        """Let the migrator decide. The dispatcher may send at once what the migrator returns to the queue."""
        begun = [*batch.for_migrator, *_prefills(actions)]
        while True:
            decided, failed = self._decide(migrator, begun, now)
            returned: list[ev.Event] = []
            for action in decided:
                self._take_up(action, actions, returned)
            if failed:
                self._rescue(migrator, actions, returned, now)
            if not returned:
                return
            sent = self._dispatch(returned, now)
            actions += sent
            begun = _prefills(sent)
            if not begun:
                return

    def _decide(self, migrator: Migrator, events: Sequence[ev.Event], now: float) -> tuple[list[ev.Action], bool]:
        """The migrator's actions, and whether it raised."""
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

    def _take_up(self, action: ev.Action, actions: list[ev.Action], returned: list[ev.Event]) -> None:
        """Apply one action of the migrator. Adds to `actions` for the driver and to `returned` for the dispatcher."""
        if isinstance(action, ev.FreeKv | ev.LeftToLease):
            actions.append(action)
            return
        name = action.request_id if isinstance(action, ev.Abort) else action.request.id
        found = self._open.get(name)
        if isinstance(action, ev.PrefillAgain):
            if found is not None and found.state in TWO_STAGES:  # otherwise it failed in the same batch and is queued
                self._prefill_again(found, action, actions, returned)
            return
        if isinstance(action, ev.GiveUp):
            if found is not None and found.state in TWO_STAGES:
                self._give_up(action, actions, returned)
            return
        if found is not None and isinstance(action, ev.Place) and found.follow(On.PLACE):
            found.target, found.landed = action.target, False
        elif found is not None and isinstance(action, ev.Abort) and found.target == action.instance_id:
            found.follow(On.UNDONE)
            found.target = ""
        actions.append(action)

    def _prefill_again(
        self, found: OpenRequest, action: ev.PrefillAgain, actions: list[ev.Action], returned: list[ev.Event]
    ) -> None:
        """Abort the prefill if it still runs, and queue the request again, up to MAX_PREFILLS times."""
        request = found.request
        runs = self.dispatcher.holds(request.id)
        pair, reason = found.paired and runs, action.decision.reason
        if runs and not pair:
            returned.append(ev.Failed(request.id, False, reason))
        if not pair:
            request.attempts += action.counts
            if request.attempts >= MAX_PREFILLS:
                self._close(request.id, On.GIVE_UP)
                actions.append(ev.GiveUp(request, action.decision, prefilled=True))
                return
        self._follow(request.id, On.PREFILL_AGAIN)
        actions.append(action)
        # Of a pair no prefill was wasted, so it does not count: the request is queued as after a failed instance.
        returned.append(ev.Failed(request.id, True, reason) if pair else ev.Arrived(request, action.avoid))

    def _give_up(self, action: ev.GiveUp, actions: list[ev.Action], returned: list[ev.Event]) -> None:
        name = action.request.id
        self._close(name, On.GIVE_UP)
        actions.append(action)
        if self.dispatcher.holds(name):  # its prefill has not ended
            returned.append(ev.Cancelled(name))

    # ---- when a policy raises --------------------------------------------------------------------------------------

    def _salvage(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """Handle the events of a failed pass again, one by one, and answer requests that are in no queue afterwards.

        The dispatcher may receive any event twice except an arrival. Arrivals that did not reach the queue end here, as
        do requests whose Send was lost with the failed pass.
        """
        actions: list[ev.Action] = []
        for event in events:
            if not isinstance(event, ev.Arrived):
                actions += self._handle_alone(event, now)
        decided = {action.request.id for action in actions if isinstance(action, ev.Send | ev.Refuse | ev.Drop)}
        for name, found in list(self._open.items()):
            if found.state is State.QUEUED and name not in decided and not self.dispatcher.waiting(name):
                self._close(name, On.UNSCHEDULED)
                self._handle_alone(ev.Cancelled(name), now)
                actions.append(ev.Unscheduled(found.request))
        return ev.Reply(actions, now + AFTER_FAILURE_S)

    def _handle_alone(self, event: ev.Event, now: float) -> list[ev.Action]:
        try:
            return self.dispatcher.handle([event], now).actions
        except Exception as error:  # the other events of the pass are still handled
            self._report_defect("dispatcher", event, error)
            return []

    def _salvage_stages(self, migrator: Migrator, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """The same for the migrator, which may receive any event twice. A lost Place runs into its time-out."""
        actions: list[ev.Action] = []
        for event in events:
            try:
                actions += migrator.handle([event], now).actions
            except Exception as error:
                self._report_defect("migrator", event, error)
        return ev.Reply(actions, now + AFTER_FAILURE_S)

    def _report_defect(self, who: str, event: ev.Event, error: Exception) -> None:
        if self._defect is not None:
            self._defect(who, [event], error)

    def _rescue(self, migrator: Migrator, actions: list[ev.Action], returned: list[ev.Event], now: float) -> None:
        """Prefill again what the migrator lost when it raised."""
        for name, found in list(self._open.items()):
            lost = found.state is State.WAITING and migrator.state_of(name) is None
            if lost and not self.dispatcher.holds(name):
                decision = Decision("place", "migrator_failed", name, now, {"instance": found.source})
                self._prefill_again(found, ev.PrefillAgain(found.request, decision), actions, returned)


def _computed_by(found: OpenRequest, instance_id: str) -> bool:
    """Whether it is with this instance, which prefills or decodes it."""
    if found.target:
        return found.target == instance_id or (found.source == instance_id and found.paired)
    return found.source == instance_id and found.state in (State.SENT, State.PREFILLING)


def _prefills(actions: Sequence[ev.Action]) -> list[ev.Event]:
    """The requests among `actions` that will be decoded by another instance, as events for the migrator."""
    return [
        ev.PrefillSent(action.request, action.instance_id, action.part is Part.PAIR, action.prefill_s)
        for action in actions
        if type(action) is ev.Send and action.part is not Part.WHOLE
    ]


def _not_for_dispatcher(event: ev.Event) -> None:
    """The dispatcher's decisions do not depend on this event."""
