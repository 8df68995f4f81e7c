"""The asyncio driver of a StageDispatcher: events in, actions out, one wake-up, no polling.

Events of one loop iteration are handed over in one batch. An arrival on an unsaturated fleet is therefore sent in the
iteration in which it was read. Acceptance and token progress alone start no pass: they travel with the next event, or
after 50 ms.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from api.openai.disaggregation.handoff import Handoff
from api.openai.in_flight import Flight, Phase, Unreadable
from api.openai.protocol.errors import ApiError, engine_refusal, shutting_down
from api.openai.relay import end_with_error, relay
from controller.core import events as ev
from controller.core.decisions import Decision
from controller.core.records import ENGINE_REJECTED
from controller.core.types import Outcome
from controller.dispatch import Migrator
from controller.wording.refusals import refusal
from workers.backends.base import Backend, EngineError, UpstreamCall

log = logging.getLogger(__name__)

PROGRESS_S = 0.05  # how long token counts may wait for another event to travel with
AFTER_FAILURE_S = 0.1  # next try of a dispatcher that raised
SHORTEST_WAKE_S = 0.0005  # a wake-up in the past must not spin the loop


class Dispatches(Protocol):
    """The part of StageDispatcher that a driver drives."""

    name: str

    def handle(self, events: list[ev.Event], now: float) -> ev.Reply: ...

    def waiting(self, request_id: str) -> bool: ...


class Outcomes(Protocol):
    """Hears of every request that ended, exactly once."""

    def ended(self, flight: Flight, outcome: Outcome, now: float, *, code: str = "", status: int = 200) -> None: ...


class Runtime:
    """Owns all open requests. Not thread-safe: everything happens on the loop."""

    def __init__(
        self,
        dispatcher: Dispatches,
        backends: Mapping[str, Backend],
        outcomes: Outcomes,
        *,
        suspect: Callable[[str], None] = lambda instance_id: None,
        heard: Callable[[str, float], None] = lambda instance_id, now: None,
        clock: Callable[[], float] = time.monotonic,
        migrator: Migrator | None = None,
    ) -> None:
        """`migrator`: without one, instances that only prefill or decode are of no use."""
        self.dispatcher = dispatcher
        self.flights: dict[str, Flight] = {}
        self.decided: Counter[tuple[str, str, str, str]] = Counter()  # (tenant, class, kind, reason)
        self.clock = clock
        self._backends = backends
        self._outcomes = outcomes
        self._suspect = suspect  # told of an instance that cannot be reached
        self._heard = heard  # told of each token's instance: it lives
        self._events: list[ev.Event] = []
        self._progress: set[str] = set()
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.handoff = Handoff(migrator, backends, self) if migrator is not None else None

    # ---- what the gateway tells -----------------------------------------------------------------------------------

    def arrive(self, flight: Flight) -> None:
        self.flights[flight.request.id] = flight
        self.push(ev.Arrived(flight.request))

    def hang_up(self, flight: Flight) -> None:
        """The client is gone: cancel at the engine at once."""
        if flight.phase != Phase.DONE:
            self._end(flight, Outcome.CANCELLED, code="client_closed", status=499)
            self.push(ev.Cancelled(flight.request.id))

    def instance_down(self, instance_id: str, why: str) -> None:
        """Fail what it was serving; the dispatcher sends elsewhere what has no token yet."""
        self.push(ev.InstanceDown(instance_id))
        error = EngineError(f"instance {instance_id} is down: {why}")
        for flight in [f for f in self.flights.values() if f.instance == instance_id and f.task is not None]:
            self._stop(flight)
            self.lost(flight, error)

    def serving(self, instance_id: str) -> int:
        """Requests that would be lost or begin anew without it: also those whose KV it still holds for another."""
        return sum(1 for flight in self.flights.values() if _needs(flight, instance_id))

    def push(self, event: ev.Event) -> None:
        self._events.append(event)
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._pass)

    # ---- what the relay tells -------------------------------------------------------------------------------------

    def accepted(self, flight: Flight) -> None:
        """It frees no room, so it starts no pass either."""
        self.tell(ev.Accepted(flight.request.id))

    def pulling(self, flight: Flight) -> None:
        """Only decode stages pull, whose driver is another."""

    def tell(self, event: ev.Event) -> None:
        """What starts no pass of its own."""
        self._events.append(event)
        self._soon_enough()

    def first_token(self, flight: Flight, now: float) -> None:
        self._heard(flight.instance, now)
        self.push(ev.FirstToken(flight.request.id))

    def progressed(self, flight: Flight, now: float) -> None:
        self._heard(flight.instance, now)
        self._progress.add(flight.request.id)
        self._soon_enough()

    def _soon_enough(self) -> None:
        if self._soon is None and self._later is None:
            self._later = asyncio.get_running_loop().call_later(PROGRESS_S, self._pass)

    def completed(self, flight: Flight, now: float) -> None:
        if flight.usage is not None:
            flight.output_tokens = flight.usage.completion_tokens
        flight.task = None  # it ends by itself after the last write
        self.push(ev.Finished(flight.request.id, flight.output_tokens))
        self._end(flight, Outcome.OK)

    def lost(self, flight: Flight, error: EngineError) -> None:
        """Its engine failed it: the dispatcher retries before the first token, an error event ends it after."""
        flight.task = None
        self._stop(flight)
        if error.unreachable:
            self._suspect(flight.instance)
        if isinstance(error, Unreadable):
            self.push(ev.Failed(flight.request.id, False, str(error)))
            started = flight.phase == Phase.STARTED
            outcome = Outcome.CUT if started else Outcome.FAILED
            self._refuse(flight, outcome, ApiError("engine_failed", str(error)), started=started)
        elif flight.prefill_instance and flight.phase == Phase.SENT and self.handoff is not None:
            self.handoff.decode_lost(flight, error)
        elif flight.phase == Phase.STARTED:
            self.push(ev.Failed(flight.request.id, False, str(error)))
            message = "The engine failed during the answer; it is incomplete."
            self._refuse(flight, Outcome.CUT, ApiError("engine_failed", message), started=True)
        elif error.client_fault:
            self.push(ev.Cancelled(flight.request.id))
            self._end(flight, Outcome.REFUSED, code=ENGINE_REJECTED, status=error.status)
            self.spawn(end_with_error(flight, engine_refusal(error.status, error.body), started=False))
        else:
            log.warning("request %s failed on %s: %s", flight.request.id, flight.instance, error)
            flight.restart()
            self.push(ev.Failed(flight.request.id, True, str(error)))

    def suspect(self, instance_id: str) -> None:
        """It could not be reached."""
        self._suspect(instance_id)

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        now = self.clock()
        events = self._collect()
        self._wake = None
        handoff = self.handoff
        told = events if handoff is None else handoff.for_dispatcher(events)
        try:
            reply = self.dispatcher.handle(told, now)
        except Exception:  # a bug in a policy must not leave clients waiting for ever
            log.exception("the dispatcher failed on %d events", len(events))
            reply = self._salvage(told, now)
        if reply.wake_at is not None:
            delay = max(SHORTEST_WAKE_S, reply.wake_at - now)
            self._wake = asyncio.get_running_loop().call_later(delay, self._woke)
        for action in reply.actions:
            self._act(action, now)
        if handoff is not None:
            handoff.take(events, reply.actions, now)

    def _salvage(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """What happened must not be lost with the pass: fed again, one by one. Whoever waits nowhere is answered.

        Events are safe to hear twice. Arrivals are not: those that did not get into the queue end here, as do requests
        whose Send was lost with the failed pass.
        """
        actions: list[ev.Action] = []
        for event in events:
            if not isinstance(event, ev.Arrived):
                actions += self._once_more(event, now)
        decided = {action.request.id for action in actions if not isinstance(action, ev.Abort)}
        for flight in [f for f in self.flights.values() if f.phase == Phase.QUEUED]:
            if flight.request.id not in decided and not self.dispatcher.waiting(flight.request.id):
                error = ApiError("internal_error", "The request could not be scheduled.")
                self.push(ev.Cancelled(flight.request.id))
                self._refuse(flight, Outcome.FAILED, error, started=False)
        return ev.Reply(actions, now + AFTER_FAILURE_S)

    def _once_more(self, event: ev.Event, now: float) -> list[ev.Action]:
        try:
            return self.dispatcher.handle([event], now).actions
        except Exception:  # this event is the one it fails on: the others are not to suffer
            log.exception("the dispatcher failed on %r alone", event)
            return []

    def _woke(self) -> None:
        self._wake = None
        self.push(ev.Woke())

    def _collect(self) -> list[ev.Event]:
        """The batch; every pass answers with a new wake-up, so all timers of the old one go."""
        for handle in (self._soon, self._later, self._wake):
            if handle is not None:
                handle.cancel()
        self._soon = self._later = None
        events, self._events = self._events, []
        for request_id in self._progress:
            if flight := self.flights.get(request_id):
                events.append(ev.Progress(request_id, flight.output_tokens))
        self._progress.clear()
        return events

    # ---- actions --------------------------------------------------------------------------------------------------

    def _act(self, action: ev.Action, now: float) -> None:
        if isinstance(action, ev.Abort):
            self._abort(action)
            return
        flight = self.flights.get(action.request.id)
        if flight is None:  # it ended in this very iteration; its Cancelled is in the next batch
            return
        self.note(flight, action.decision)
        if isinstance(action, ev.Send):
            self._send(flight, action, now)
        elif isinstance(action, ev.Refuse):
            field = action.decision.figures.get("field")
            param = field if isinstance(field, str) else None
            error = ApiError(action.code, refusal(action.decision), param=param, retry_after_s=action.retry_after_s)
            outcome = Outcome.FAILED if flight.sends else Outcome.REFUSED
            self._refuse(flight, outcome, error, started=False)
        elif action.decision.kind == "cancel":
            error = ApiError("cancelled", "The request was cancelled by an operator.")
            self._refuse(flight, Outcome.REFUSED, error, started=False)
        else:
            error = ApiError("waiting_time_exceeded", refusal(action.decision))
            self._refuse(flight, Outcome.EXPIRED, error, started=False)

    def note(self, flight: Flight, decision: Decision) -> None:
        flight.note(decision)
        request = flight.request
        self.decided[request.tenant, request.slo_class, decision.kind, decision.reason] += 1

    def _send(self, flight: Flight, action: ev.Send, now: float) -> None:
        backend = self._backends.get(action.instance_id)
        flight.instance = action.instance_id
        flight.sent_at = now
        flight.sends += 1
        if backend is None:
            self.push(ev.Failed(flight.request.id, True, f"no instance {action.instance_id}"))
            return
        flight.phase = Phase.SENT
        call = flight.call(action.rank)
        if self.handoff is not None and self.handoff.prefills(action.instance_id):
            self.handoff.begin(flight, backend, call)
            return
        self.plainly(flight, backend, call)
        if not flight.streamed:
            prefilled = ev.FirstToken(flight.request.id, assumed=True)
            flight.prefilled = asyncio.get_running_loop().call_later(action.prefill_s, self.push, prefilled)

    def plainly(self, flight: Flight, backend: Backend, call: UpstreamCall) -> None:
        """The whole answer from one engine."""
        flight.task = self.spawn(relay(flight, backend, call, self))

    def _abort(self, action: ev.Abort) -> None:
        """Asked for by the dispatcher: the request ends as cancelled, unless it has ended already."""
        if flight := self.flights.get(action.request_id):
            error = ApiError("cancelled", "The request was cancelled.")
            self._refuse(flight, Outcome.REFUSED, error, started=flight.phase == Phase.STARTED)

    def refuse(self, flight: Flight, outcome: Outcome, error: ApiError) -> None:
        self._refuse(flight, outcome, error, started=flight.phase == Phase.STARTED)

    def _refuse(self, flight: Flight, outcome: Outcome, error: ApiError, *, started: bool) -> None:
        self._end(flight, outcome, code=error.code, status=200 if started else error.status)
        self.spawn(end_with_error(flight, error, started=started))

    def _end(self, flight: Flight, outcome: Outcome, *, code: str = "", status: int = 200) -> None:
        self._stop(flight)
        flight.phase = Phase.DONE
        if self.handoff is not None:
            self.handoff.forget(flight)
        del self.flights[flight.request.id]
        # Judging and recording take as long as all else at the end of a request: the last bytes leave before it.
        ended = partial(self._outcomes.ended, flight, outcome, self.clock(), code=code, status=status)
        asyncio.get_running_loop().call_soon(ended)

    def _stop(self, flight: Flight) -> None:
        if flight.task is not None:
            flight.task.cancel()
            flight.task = None
        if flight.prefilled is not None:
            flight.prefilled.cancel()
            flight.prefilled = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is kept until done; what it raises is logged, never lost."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request's task failed", exc_info=error)

    def give_up(self) -> None:
        """The gateway stops: whatever is still open ends, with its record, in words that its client understands."""
        for flight in list(self.flights.values()):
            started = flight.phase == Phase.STARTED
            outcome = Outcome.CUT if started else Outcome.FAILED if flight.sends else Outcome.REFUSED
            self.push(ev.Cancelled(flight.request.id))
            self._refuse(flight, outcome, shutting_down(), started=started)

    async def drain(self, timeout_s: float) -> None:
        """Wait for open writes at shutdown."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)


def _needs(flight: Flight, instance_id: str) -> bool:
    holds = flight.phase == Phase.SENT and flight.prefill_instance == instance_id
    return holds or (flight.phase != Phase.QUEUED and flight.instance == instance_id)
