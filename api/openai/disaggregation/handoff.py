"""Prefill here, decode there: the gateway's driver of the Migrator, beside the runtime that drives the dispatcher.

A prefill instance is asked for one token and keeps the KV. The migrator, fed and woken by `passes`, then places the
decode stage; that engine pulls the KV and streams the answer from its first token on. Engines that give out KV while
they compute are pulled from beside their prefill (`overlap`); engines that want both stages at once get them so, when
the decode stage is placed (`pairs`). Until a byte has reached the client every failure is undone: the decode is placed
again, or the prompt is prefilled again. Without instances of a role nothing here runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from api.openai.disaggregation.decode_leg import DecodeLeg
from api.openai.disaggregation.kv_transfers import Transfers, asks_wrong, reason_of, told_migrator
from api.openai.disaggregation.overlap import Overlap
from api.openai.disaggregation.pairs import Pairs
from api.openai.disaggregation.passes import Passes
from api.openai.disaggregation.roles import Roles
from api.openai.disaggregation.stage_rates import StageRates
from api.openai.in_flight import Flight, Phase
from api.openai.protocol.errors import ApiError
from api.openai.relay import relay
from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.types import Outcome
from controller.dispatch import Migrator
from controller.dispatch.lifecycle import MAX_PREFILLS
from workers.backends.base import Backend, EngineError, Prefilled, UpstreamCall

log = logging.getLogger(__name__)

OF_INSTANCES = (ev.InstanceUp, ev.InstanceDown, ev.InstanceDraining, ev.SharesChanged, ev.Telemetry)


class Host(Protocol):
    """What the handoff asks of the runtime."""

    flights: dict[str, Flight]

    def clock(self) -> float: ...

    def push(self, event: ev.Event) -> None: ...

    def tell(self, event: ev.Event) -> None: ...

    def spawn(self, work: object) -> asyncio.Task[None]: ...

    def accepted(self, flight: Flight) -> None: ...

    def pulling(self, flight: Flight) -> None: ...

    def first_token(self, flight: Flight, now: float) -> None: ...

    def progressed(self, flight: Flight, now: float) -> None: ...

    def completed(self, flight: Flight, now: float) -> None: ...

    def lost(self, flight: Flight, error: EngineError) -> None: ...

    def suspect(self, instance_id: str) -> None: ...

    def plainly(self, flight: Flight, backend: Backend, call: UpstreamCall) -> None: ...

    def note(self, flight: Flight, decision: Decision) -> None: ...

    def refuse(self, flight: Flight, outcome: Outcome, error: ApiError) -> None: ...


class Handoff:
    """The migrator hears everything the dispatcher hears."""

    def __init__(self, migrator: Migrator, backends: Mapping[str, Backend], host: Host) -> None:
        self.migrator = migrator
        self.rates = StageRates()
        self.transfers = Transfers(host, backends)
        self._backends = backends
        self._host = host
        self._roles = Roles()
        self._offers: dict[str, Prefilled] = {}
        self._calls: dict[str, UpstreamCall] = {}
        self._passes = Passes(migrator, self._act, self._woke, self._rescue)
        self._pairs = Pairs(backends, self)
        self._overlap = Overlap()

    @property
    def active(self) -> bool:
        """Are there instances of a role, or requests that were begun while there were?"""
        return len(self._roles) > 0 or self.migrator.busy

    def prefills(self, instance_id: str) -> bool:
        return self._roles.prefills(instance_id)

    # ---- what the runtime says ------------------------------------------------------------------------------------

    def for_dispatcher(self, events: Sequence[ev.Event]) -> Sequence[ev.Event]:
        return self._roles.for_dispatcher(events)

    def take(self, events: Sequence[ev.Event], actions: Sequence[ev.Action], now: float) -> None:
        """After each pass of the dispatcher: the same events, and what it sent to prefill instances.

        Without roles only what is said of instances: the migrator has to know them all when there are some again.
        """
        news = [*events] if self.active else [event for event in events if isinstance(event, OF_INSTANCES)]
        if not news and not self.active:
            return
        for action in actions:
            if isinstance(action, ev.Send) and self._has_two_stages(action):
                paired = self._pairs.takes(action.instance_id)
                news.append(ev.PrefillSent(action.request, action.instance_id, paired, action.prefill_s))
        self._passes.run(news, now)
        for action in actions:
            if isinstance(action, ev.Send) and not self._turned_away(action):
                self.rates.sent(action.request.model, now, prefill=self._has_two_stages(action))

    def _has_two_stages(self, send: ev.Send) -> bool:
        """Of a request for one token nothing is left for another engine, but in pairs."""
        apart = self._pairs.takes(send.instance_id) or send.request.max_tokens != 1
        return apart and self.prefills(send.instance_id)

    def _turned_away(self, send: ev.Send) -> bool:
        """In this very pass: it waits for another instance, and is counted when it is sent there."""
        flight = self._host.flights.get(send.request.id)
        return flight is not None and flight.phase == Phase.QUEUED

    def begin(self, flight: Flight, backend: Backend, call: UpstreamCall) -> None:
        """Prefill at an instance of that role. A request for one token needs no other engine, but in pairs."""
        if self._pairs.takes(backend.spec.id):
            self._calls[flight.request.id] = call
            self._pairs.expect(flight.request.id)
            return
        if flight.request.max_tokens == 1:
            self._host.plainly(flight, backend, call)
            return
        self._calls[flight.request.id] = call
        self.transfers.begun(flight.request.id, backend.spec.id)
        flight.task = self._host.spawn(self._prefill(flight, backend, call))

    def forget(self, flight: Flight) -> None:
        """It is over, or begins anew."""
        name = flight.request.id
        prefilling = self._overlap.source(name)
        self._pairs.forget(name)
        self._overlap.forget(name)
        offered, began = self._offers.pop(name, None), self._calls.pop(name, None)
        if prefilling or (began is not None and offered is None):
            # Its engine may just have ended the prefill it is told to abort.
            self.transfers.free(name, prefilling or flight.instance)
        self.transfers.forget(flight, self._host.clock())

    # ---- prefill ---------------------------------------------------------------------------------------------------

    async def _prefill(self, flight: Flight, backend: Backend, call: UpstreamCall) -> None:
        name, source = flight.request.id, backend.spec.id
        try:
            prefilled = await backend.prefill(call, partial(self._ending, flight, source))
        except EngineError as error:
            if self._overlap.ended(name):
                self._overlapped_lost(flight, source, error)
            elif flight.phase == Phase.SENT:
                self._calls.pop(name, None)
                self._host.lost(flight, error)
            return
        if not self._overlap.ended(name):
            flight.task = None
        if prefilled.done:  # nothing is left for a decode stage, and the migrator need not wait for one
            self._withdraw(flight, source)
            self._calls.pop(name, None)
            # Its answer is one token: cheap to ask for once more, as the client wants it framed.
            self._host.plainly(flight, backend, call)
            return
        self._offers[name] = prefilled
        self.prefilled(flight, source)

    def _ending(self, flight: Flight, source: str, offer: bytes) -> None:
        """Its prompt is nearly computed, and its KV may be pulled."""
        if not self.migrator.config.overlap or flight.phase != Phase.SENT:
            return
        self._offers[flight.request.id] = Prefilled(offer, False)
        self._overlap.begin(flight)
        self._host.push(ev.PrefillEnding(flight.request.id, source))

    def _overlapped_lost(self, flight: Flight, source: str, error: EngineError) -> None:
        """A decode stage needs nothing else of its prefill: once its engine says that all KV is there it goes on."""
        under_way = self.transfers.under_way(flight)
        if flight.phase == Phase.DONE:
            return
        if flight.task is None or (under_way and flight.moved is None):
            if flight.phase == Phase.SENT:
                self.prefill_lost(flight, source, error)
            return
        if under_way:  # of a stream, before its first token
            self.landed(flight, self._host.clock())
            released = flight.moved is not None
            self._host.push(ev.TransferDone(flight.request.id, flight.instance, flight.moved, released=released))
        self.prefilled(flight, source)
        if error.unreachable:
            self._host.suspect(source)

    def _withdraw(self, flight: Flight, source: str) -> None:
        """It has one engine again: the migrator forgets it, and a decode stage that waits for KV is aborted."""
        self._passes.run([ev.Cancelled(flight.request.id)], self._host.clock())
        flight.instance, flight.prefill_instance = source, ""

    def prefilled(self, flight: Flight, source: str) -> None:
        """Its work there is over. Of a pair the KV has been taken, too."""
        request, now = flight.request, self._host.clock()
        self.rates.prefilled(request.model, now)
        figures: dict[str, Figure] = {"instance": source, "tokens": request.prompt_tokens}
        self._host.note(flight, Decision("prefill", "prefilled", request.id, now, figures))
        self._host.push(ev.PrefillDone(request, source, request.prompt_tokens))

    def taken(self, flight: Flight) -> None:
        """Of a pair whose answer shows no first token: the prefill engine's own answer says that its KV has moved."""
        if not flight.streamed:
            self._host.push(ev.TransferDone(flight.request.id, flight.instance))

    def prefill_lost(self, flight: Flight, source: str, error: EngineError) -> None:
        """Whose decode stage was placed already: that is undone, and the dispatcher hears of it as of any failure."""
        if flight.task is not None and flight.task is not asyncio.current_task():
            flight.task.cancel()
        flight.task = None
        self.transfers.undone(flight, "prefill_failed", self._host.clock())
        flight.instance, flight.prefill_instance = source, ""
        self._calls.pop(flight.request.id, None)
        self._offers.pop(flight.request.id, None)
        self._host.lost(flight, error)

    def spawn(self, work: object) -> asyncio.Task[None]:
        return self._host.spawn(work)

    # ---- the migrator's actions ------------------------------------------------------------------------------------

    def _rescue(self, now: float) -> None:
        """Prefilled requests that the migrator has lost begin anew."""
        for name in [name for name in self._offers if self.migrator.state_of(name) is None]:
            flight = self._host.flights.get(name)
            if flight is not None and flight.task is None and not self._overlap.holds(name):
                self._again(flight, Decision("place", "migrator_failed", name, now, {"instance": flight.instance}))

    def _woke(self) -> None:
        """Behind what has happened: a first token that was seen just now comes before its time-out."""
        self._host.push(ev.Woke())

    def _act(self, action: ev.Action) -> None:
        if isinstance(action, ev.FreeKv):
            self.transfers.free(action.request_id, action.instance_id)
            return
        if isinstance(action, ev.LeftToLease):
            self.transfers.left(action)
            return
        name = action.request_id if isinstance(action, ev.Abort) else action.request.id
        flight = self._host.flights.get(name)
        if flight is None:
            return
        if isinstance(action, ev.Place):
            self._place(flight, action)
        elif isinstance(action, ev.Abort):
            self._undo(flight, action)
        elif isinstance(action, ev.PrefillAgain) and name in self._calls:  # else it has one engine by now
            self._again(flight, action.decision, action.avoid, action.counts)
        elif isinstance(action, ev.GiveUp):
            self._host.note(flight, action.decision)
            if self._counted(name):
                self._host.push(ev.Cancelled(name))
            self._host.refuse(flight, Outcome.FAILED, ApiError("no_capacity", "No engine could decode the answer."))

    def _place(self, flight: Flight, action: ev.Place) -> None:
        prefilled, call = self._offers.get(flight.request.id), self._calls.get(flight.request.id)
        backend = self._backends.get(action.target)
        paired = self._pairs.takes(action.source)
        if call is None or backend is None or (prefilled is None and not paired):
            self._host.push(ev.TransferFailed(flight.request.id, action.target, "no_instance"))
            return
        if paired and not self._pairs.holds(flight.request.id):
            self._anew(flight, "kv_lost", flight.instance)
            return
        self._host.note(flight, action.decision)
        flight.instance, flight.prefill_instance = action.target, action.source
        self.transfers.placed(action, "placed" if call.streamed and prefilled is not None else "moving")
        flight.moved = None
        leg = DecodeLeg(self._host, action, self, backend.capabilities)
        if prefilled is None:
            self._pairs.begin(flight, action.source, call, action.rank, leg)
            self._host.push(ev.TransferStarted(flight.request.id, action.target))
            return
        there = replace(call, rank=action.rank, offer=prefilled.offer)
        flight.task = self._host.spawn(relay(flight, backend, there, leg))
        if call.streamed:
            return  # its headers say that it has begun
        self._host.push(ev.TransferStarted(flight.request.id, action.target))
        if not backend.capabilities.tells_landing:
            self._host.push(ev.TransferDone(flight.request.id, action.target, assumed=True))

    def decode_lost(self, flight: Flight, error: EngineError) -> None:
        """The decode engine failed before its first byte reached the client."""
        reason = reason_of(error)
        request, target, landed = flight.request, flight.instance, not self.transfers.under_way(flight)
        log.warning("decode of %s on %s: %s (%s)", request.id, target, error, reason)
        self.transfers.failed(flight, reason, error, self._host.clock())
        if self._pairs.takes(flight.prefill_instance):
            self._pair_lost(flight, error, reason)
        elif asks_wrong(error):
            self._refused(flight, error)
        elif landed:  # its KV was taken, and what it became is lost
            self._anew(flight, "decode_failed", reason)
        else:
            self._host.push(ev.TransferFailed(request.id, target, told_migrator(error)))

    def _pair_lost(self, flight: Flight, error: EngineError, reason: str) -> None:
        """Both begin anew with another decode engine; once its KV had been taken, from the queue."""
        request, target = flight.request, flight.instance
        self._pairs.end(request.id)
        if error.client_fault:
            self._refused(flight, error)
        elif self._pairs.holds(request.id):
            flight.instance = flight.prefill_instance
            # Without room a decode engine lets a pair wait: its refusal is a failure, and counted.
            self._host.push(ev.TransferFailed(request.id, target, "refused" if reason == "no_room" else reason))
        else:
            self._anew(flight, "decode_failed", reason)

    def _refused(self, flight: Flight, error: EngineError) -> None:
        """It is the request that is at fault: it ends as one whose only engine says so."""
        flight.instance, flight.prefill_instance = flight.prefill_instance, ""
        self._host.lost(flight, error)

    def _anew(self, flight: Flight, why: str, error: str) -> None:
        """The migrator forgets the request, the dispatcher gets it once more."""
        request = flight.request
        if not self._overlap.holds(request.id):  # else _again takes it from its prefill engine
            self._host.push(ev.Failed(request.id, True, error))
        figures: dict[str, Figure] = {"instance": flight.instance, "error": error}
        self._again(flight, Decision("place", why, request.id, self._host.clock(), figures))

    def _undo(self, flight: Flight, action: ev.Abort) -> None:
        """Only its decode stage, and a prefill sent with it: the request itself goes on."""
        self._pairs.end(flight.request.id)
        if flight.instance == action.instance_id and flight.prefill_instance and flight.task is not None:
            flight.task.cancel()
            flight.task = None
            self.transfers.undone(flight, action.reason or "undone", self._host.clock())

    def _again(
        self, flight: Flight, decision: Decision, avoid: frozenset[str] = frozenset(), counts: bool = True
    ) -> None:
        if flight.phase != Phase.SENT:  # it failed in the same moment, and begins anew already
            return
        self._host.note(flight, decision)
        request, held = flight.request, self._pairs.holds(flight.request.id)
        known = request.id in self._calls and request.id not in self._offers
        prefilling = known and not held and not flight.prefill_instance
        if prefilling and flight.task is not None:
            flight.task.cancel()
        if prefilling or self._overlap.holds(request.id):
            self._host.push(ev.Failed(request.id, False, decision.reason))  # its prefill goes; what follows is Arrived
        self.forget(flight)
        if held:  # the dispatcher counts it at its prefill instance still
            flight.restart()
            self._host.push(ev.Failed(request.id, True, decision.reason))
            return
        request.attempts += counts
        if request.attempts >= MAX_PREFILLS:
            error = ApiError("no_capacity", "The engines that held this request's KV failed.")
            self._host.refuse(flight, Outcome.FAILED, error)
            return
        flight.restart()
        self._host.push(ev.Arrived(request, avoid))

    def _counted(self, request_id: str) -> bool:
        """By the dispatcher, at its prefill instance."""
        return self._pairs.holds(request_id) or self._overlap.holds(request_id)

    def reached(self, flight: Flight, state: str) -> None:
        self.transfers.reached(flight, state)

    def landed(self, flight: Flight, now: float) -> None:
        self.transfers.landed(flight, flight.moved, now)

    def decoded(self, flight: Flight, now: float) -> None:
        self.rates.decoded(flight.request.model, now)

    def close(self) -> None:
        self.transfers.close()
        self._passes.close()
