"""Prefill here, decode there: the gateway's driver of the Migrator, beside the runtime that drives the dispatcher.

A prefill instance is asked for one token and keeps the KV. The migrator then places the decode stage; that engine pulls
the KV and streams the answer from its first token on. Until a byte has reached the client every failure is undone: the
decode is placed again, or the prompt is prefilled again. Without instances of a role nothing here runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from api.openai.errors import ApiError
from api.openai.flight import Flight, Phase
from api.openai.relay import relay
from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.types import Outcome, Role
from controller.dispatch import Migrator
from workers.backends.base import Backend, EngineError, Prefilled, UpstreamCall

log = logging.getLogger(__name__)

NO_ROOM = 503  # the decode engine has no blocks now: it may have some soon
SHORTEST_WAKE_S = 0.0005
MAX_PREFILLS = 3  # of one request whose KV was lost


class Host(Protocol):
    """What the handoff asks of the runtime."""

    flights: dict[str, Flight]

    def clock(self) -> float: ...

    def push(self, event: ev.Event) -> None: ...

    def spawn(self, work: object) -> asyncio.Task[None]: ...

    def accepted(self, flight: Flight) -> None: ...

    def first_token(self, flight: Flight, now: float) -> None: ...

    def progressed(self, flight: Flight, now: float) -> None: ...

    def completed(self, flight: Flight, now: float) -> None: ...

    def lost(self, flight: Flight, error: EngineError) -> None: ...

    def plainly(self, flight: Flight, backend: Backend, call: UpstreamCall) -> None: ...

    def note(self, flight: Flight, decision: Decision) -> None: ...

    def refuse(self, flight: Flight, outcome: Outcome, error: ApiError) -> None: ...


class Handoff:
    """`roles` by instance, as configured; the migrator hears everything the dispatcher hears."""

    def __init__(self, migrator: Migrator, backends: Mapping[str, Backend], host: Host) -> None:
        self.migrator = migrator
        self.moved = 0  # decode stages that began elsewhere
        self._backends = backends
        self._host = host
        self._roles: dict[str, Role] = {}
        self._offers: dict[str, Prefilled] = {}
        self._calls: dict[str, UpstreamCall] = {}
        self._wake: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        return bool(self._roles)

    def prefills(self, instance_id: str) -> bool:
        return self._roles.get(instance_id) is Role.PREFILL

    # ---- what the runtime says ------------------------------------------------------------------------------------

    def for_dispatcher(self, events: Sequence[ev.Event]) -> Sequence[ev.Event]:
        """Learn of roles; decode instances are the migrator's: one that becomes one is gone for the dispatcher."""
        if not any(isinstance(event, ev.InstanceUp) for event in events):
            return events
        told: list[ev.Event] = []
        for event in events:
            if isinstance(event, ev.InstanceUp):
                self._set(event.spec.id, event.spec.role)
                gone = event.spec.role is Role.DECODE
                told.append(ev.InstanceDown(event.spec.id) if gone else event)
            else:
                told.append(event)
        return told

    def _set(self, instance_id: str, role: Role) -> None:
        if role is Role.COLLOCATED:
            self._roles.pop(instance_id, None)
        else:
            self._roles[instance_id] = role

    def take(self, events: Sequence[ev.Event], actions: Sequence[ev.Action], now: float) -> None:
        """After each pass of the dispatcher: the same events, and what it sent to prefill instances."""
        if not self.active:
            return
        news: list[ev.Event] = [*events]
        for action in actions:
            if isinstance(action, ev.Send) and self.prefills(action.instance_id) and not _one_token(action):
                news.append(ev.PrefillSent(action.request, action.instance_id))
        self._pass(news, now)

    def begin(self, flight: Flight, backend: Backend, call: UpstreamCall) -> None:
        """Prefill at an instance of that role. A request for one token needs no other engine."""
        if flight.request.max_tokens == 1:
            self._host.plainly(flight, backend, call)
            return
        self._calls[flight.request.id] = call
        flight.task = self._host.spawn(self._prefill(flight, backend, call))

    def forget(self, flight: Flight) -> None:
        """It is over."""
        self._offers.pop(flight.request.id, None)
        self._calls.pop(flight.request.id, None)

    # ---- prefill ---------------------------------------------------------------------------------------------------

    async def _prefill(self, flight: Flight, backend: Backend, call: UpstreamCall) -> None:
        try:
            prefilled = await backend.prefill(call)
        except EngineError as error:
            if flight.phase != Phase.DONE:
                self._host.lost(flight, error)
            return
        flight.task = None
        if prefilled.done:  # its answer is one token: cheap to ask for once more, as the client wants it framed
            self._host.plainly(flight, backend, call)
            return
        request, now = flight.request, self._host.clock()
        self._offers[request.id] = prefilled
        figures: dict[str, Figure] = {"instance": flight.instance, "tokens": request.prompt_tokens}
        self._host.note(flight, Decision("prefill", "prefilled", request.id, now, figures))
        self._host.push(ev.PrefillDone(request, flight.instance, request.prompt_tokens))

    # ---- the migrator's actions ------------------------------------------------------------------------------------

    def _pass(self, events: list[ev.Event], now: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        reply = self.migrator.handle(events, now)
        if reply.wake_at is not None and math.isfinite(reply.wake_at):
            delay = max(SHORTEST_WAKE_S, reply.wake_at - now)
            self._wake = asyncio.get_running_loop().call_later(delay, self._woke)
        for action in reply.actions:
            self._act(action)

    def _woke(self) -> None:
        self._wake = None
        self._pass([ev.Woke()], self._host.clock())

    def _act(self, action: ev.Action) -> None:
        name = action.request_id if isinstance(action, ev.Abort | ev.FreeKv) else action.request.id
        flight = self._host.flights.get(name)
        if flight is None:
            return
        if isinstance(action, ev.Place):
            self._place(flight, action)
        elif isinstance(action, ev.Abort):
            self._undo(flight, action.instance_id)
        elif isinstance(action, ev.PrefillAgain):
            self._again(flight, action.decision)
        elif isinstance(action, ev.GiveUp):
            self._host.note(flight, action.decision)
            self._host.refuse(flight, Outcome.FAILED, ApiError("no_capacity", "No engine could decode the answer."))

    def _place(self, flight: Flight, action: ev.Place) -> None:
        prefilled, call = self._offers.get(flight.request.id), self._calls.get(flight.request.id)
        backend = self._backends.get(action.target)
        if prefilled is None or call is None or backend is None:
            self._host.push(ev.TransferFailed(flight.request.id, action.target, "no_instance"))
            return
        self._host.note(flight, action.decision)
        flight.instance, flight.prefill_instance = action.target, action.source
        leg = DecodeLeg(self._host, action, self._moved)
        there = replace(call, rank=action.rank, offer=prefilled.offer)
        flight.task = self._host.spawn(relay(flight, backend, there, leg))
        self._host.push(ev.TransferStarted(flight.request.id, action.target))
        if not call.streamed:  # nobody will see when it begins
            self._host.push(ev.TransferDone(flight.request.id, action.target))

    def _moved(self) -> None:
        self.moved += 1

    def decode_lost(self, flight: Flight, error: EngineError) -> None:
        """The decode engine failed before its first byte reached the client."""
        reason = "no_room" if error.status == NO_ROOM else "unreachable" if error.unreachable else "transfer_failed"
        request, target = flight.request, flight.instance
        log.warning("decode of %s on %s: %s (%s)", request.id, target, error, reason)
        if flight.streamed:
            self._host.push(ev.TransferFailed(request.id, target, reason))
            return
        # Of an answer in one piece nobody knew whether its KV had landed: it begins anew.
        self._host.push(ev.Failed(request.id, True, str(error)))
        figures: dict[str, Figure] = {"instance": target, "error": reason}
        self._again(flight, Decision("place", "decode_failed", request.id, self._host.clock(), figures))

    def _undo(self, flight: Flight, instance_id: str) -> None:
        """Only its decode stage: the request itself goes on."""
        if flight.instance == instance_id and flight.prefill_instance and flight.task is not None:
            flight.task.cancel()
            flight.task = None

    def _again(self, flight: Flight, decision: Decision) -> None:
        self._host.note(flight, decision)
        self.forget(flight)
        request = flight.request
        request.attempts += 1
        if request.attempts >= MAX_PREFILLS:
            error = ApiError("no_capacity", "The engines that held this request's KV failed.")
            self._host.refuse(flight, Outcome.FAILED, error)
            return
        flight.restart()
        self._host.push(ev.Arrived(request))

    def close(self) -> None:
        if self._wake is not None:
            self._wake.cancel()


class DecodeLeg:
    """What the relay tells, for an answer that another engine prefilled."""

    def __init__(self, host: Host, place: ev.Place, moved: Callable[[], None]) -> None:
        self._host = host
        self._place = place
        self._moved = moved

    def clock(self) -> float:
        return self._host.clock()

    def accepted(self, flight: Flight) -> None:
        self._host.accepted(flight)

    def first_token(self, flight: Flight, now: float) -> None:
        request = flight.request
        figures: dict[str, Figure] = {"instance": flight.instance, "after_s": now - self._place.decision.at}
        self._host.note(flight, Decision("transfer", "kv_landed", request.id, now, figures))
        self._host.push(ev.TransferDone(request.id, self._place.target))
        self._host.first_token(flight, now)
        self._moved()

    def progressed(self, flight: Flight, now: float) -> None:
        self._host.progressed(flight, now)

    def completed(self, flight: Flight, now: float) -> None:
        self._host.completed(flight, now)

    def lost(self, flight: Flight, error: EngineError) -> None:
        self._host.lost(flight, error)


def _one_token(send: ev.Send) -> bool:
    return send.request.max_tokens == 1
