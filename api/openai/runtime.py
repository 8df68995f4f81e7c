"""The asyncio driver of a Scheduler: events in, actions performed, one wake-up, no polling. It decides nothing.

Events of one loop iteration are handed over in one batch. An arrival on an unsaturated fleet is therefore sent in the
iteration in which it was read. Acceptance and token progress alone start no pass: they travel with the next event, or
after 50 ms.

Of a request with two stages the prefill instance is asked for one token and keeps the KV; the decode instance pulls it
and streams the answer from its first token on. Engines that give out KV while they compute are pulled from beside their
prefill. Engines that want both stages at once (pairs) get them so, with one room to meet in, when the decode stage is
placed. Nothing reaches the client before the first token, so until then every failure can begin again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from api.openai.disaggregation.decode_leg import DecodeLeg
from api.openai.disaggregation.kv_transfers import Transfers, asks_wrong, reason_of, told_migrator
from api.openai.disaggregation.stage_rates import StageRates
from api.openai.in_flight import InFlightRequest, UnreadableAnswer
from api.openai.protocol.errors import ApiError, engine_refusal, shutting_down
from api.openai.relay import end_with_error, relay
from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.records import ENGINE_REJECTED
from controller.core.types import Outcome, Part
from controller.dispatch import Scheduler
from controller.dispatch.lifecycle import State
from controller.wording.refusals import refusal
from workers.backends.base import Backend, EngineError, UpstreamCall

log = logging.getLogger(__name__)

PROGRESS_S = 0.05  # how long token counts may wait for another event to travel with

Handle = Callable[[Sequence[ev.Event], float], ev.Reply]


class Outcomes(Protocol):
    """Hears of every request that ended, exactly once."""

    def ended(
        self, flight: InFlightRequest, outcome: Outcome, now: float, *, code: str = "", status: int = 200
    ) -> None: ...


class Runtime:
    """Owns all open requests. Not thread-safe: everything happens on the loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        backends: Mapping[str, Backend],
        outcomes: Outcomes,
        *,
        handle: Handle,
        suspect: Callable[[str], None] = lambda instance_id: None,
        heard: Callable[[str, float], None] = lambda instance_id, now: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`handle`: the scheduler's, or one that records its calls. `suspect`: told of an instance that cannot be
        reached. `heard`: told of each token's instance: it lives."""
        self.scheduler = scheduler
        self.requests: dict[str, InFlightRequest] = {}
        self.decided: Counter[tuple[str, str, str, str]] = Counter()  # (tenant, class, kind, reason)
        self.clock = clock
        self.rates = StageRates()
        self.transfers = Transfers(self, backends)
        self._handle = handle
        self._backends = backends
        self._outcomes = outcomes
        self._suspect = suspect
        self._heard = heard
        self._events: list[ev.Event] = []
        self._progress: set[str] = set()
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._performs: dict[type, Callable[[Any], None]] = {
            ev.Send: self._send,
            ev.Refuse: self._refused,
            ev.Drop: self._dropped,
            ev.Unscheduled: self._unscheduled,
            ev.Place: self._place,
            ev.Abort: self._abort,
            ev.FreeKv: lambda action: self.transfers.free(action.request_id, action.instance_id),
            ev.LeftToLease: self.transfers.left,
            ev.PrefillAgain: self._prefill_again,
            ev.GiveUp: self._given_up,
        }

    # ---- what the gateway tells -----------------------------------------------------------------------------------

    def arrive(self, flight: InFlightRequest) -> None:
        self.requests[flight.request.id] = flight
        self.push(ev.Arrived(flight.request))

    def hang_up(self, flight: InFlightRequest) -> None:
        """The client is gone: cancel at the engine at once."""
        if flight.state is not State.ENDED:
            self._end(flight, Outcome.CANCELLED, code="client_closed", status=499)
            self.push(ev.Cancelled(flight.request.id))

    def instance_down(self, instance_id: str, why: str) -> None:
        """Fail what it was serving. Of KV that it kept the scheduler knows."""
        self.push(ev.InstanceDown(instance_id))
        error = EngineError(f"instance {instance_id} is down: {why}")
        for flight in [each for each in self.requests.values() if each.instance == instance_id]:
            if flight.task is not None:
                flight.stop_answer()
                self.lost(flight, error)
            elif flight.prefill is not None and flight.offer is None and not flight.prefill_instance:
                flight.stop_prefill()
                self.lost(flight, error)

    def serving(self, instance_id: str) -> int:
        """Requests that would be lost or begin again without it: also those whose KV it still holds for another."""
        return sum(1 for flight in self.requests.values() if _needs(flight, instance_id))

    def push(self, event: ev.Event) -> None:
        self._events.append(event)
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._pass)

    def tell(self, event: ev.Event) -> None:
        """What starts no pass of its own."""
        self._events.append(event)
        self._soon_enough()

    # ---- what the relay tells -------------------------------------------------------------------------------------

    def accepted(self, flight: InFlightRequest) -> None:
        """It frees no room, so it starts no pass either."""
        self.tell(ev.Accepted(flight.request.id))

    def pulling(self, flight: InFlightRequest) -> None:
        """Only decode stages pull (DecodeLeg)."""

    def first_token(self, flight: InFlightRequest, now: float) -> None:
        self._heard(flight.instance, now)
        self.push(ev.FirstToken(flight.request.id))

    def progressed(self, flight: InFlightRequest, now: float) -> None:
        self._heard(flight.instance, now)
        self._progress.add(flight.request.id)
        self._soon_enough()

    def _soon_enough(self) -> None:
        if self._soon is None and self._later is None:
            self._later = asyncio.get_running_loop().call_later(PROGRESS_S, self._pass)

    def completed(self, flight: InFlightRequest, now: float) -> None:
        if flight.usage is not None:
            flight.output_tokens = flight.usage.completion_tokens
        flight.task = None  # it ends by itself after the last write
        self.push(ev.Finished(flight.request.id, flight.output_tokens))
        self._end(flight, Outcome.OK)

    def lost(self, flight: InFlightRequest, error: EngineError) -> None:
        """Its engine failed it: retried before the first token, ended by an error event after it."""
        flight.task = None
        flight.stop_answer()
        if error.unreachable:
            self._suspect(flight.instance)
        if isinstance(error, UnreadableAnswer):
            self.push(ev.Failed(flight.request.id, False, str(error)))
            outcome = Outcome.CUT if flight.state is State.ANSWERING else Outcome.FAILED
            self._refuse(flight, outcome, ApiError("engine_failed", str(error)))
        elif flight.prefill_instance and flight.state is State.SENT:
            self._decode_lost(flight, error)
        elif flight.state is State.ANSWERING:
            self.push(ev.Failed(flight.request.id, False, str(error)))
            message = "The engine failed during the answer; it is incomplete."
            self._refuse(flight, Outcome.CUT, ApiError("engine_failed", message))
        elif error.client_fault:
            self._rejected(flight, error)
        else:
            log.warning("request %s failed on %s: %s", flight.request.id, flight.instance, error)
            flight.restart()
            self.push(ev.Failed(flight.request.id, True, str(error)))

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        now = self.clock()
        reply = self._handle(self._collect(), now)
        if reply.wake_at is not None:
            self._wake = asyncio.get_running_loop().call_later(max(0.0, reply.wake_at - now), self._woke)
        for action in reply.actions:
            self._performs[type(action)](action)
        if self.scheduler.disaggregated:
            self._count(reply.actions, now)

    def _woke(self) -> None:
        """Behind what has happened: a first token that was seen just now comes before its time-out."""
        self._wake = None
        self.push(ev.Woke())

    def _collect(self) -> list[ev.Event]:
        """The batch; every pass answers with a new wake-up, so all timers of the old one go."""
        for handle in (self._soon, self._later, self._wake):
            if handle is not None:
                handle.cancel()
        self._soon = self._later = self._wake = None
        events, self._events = self._events, []
        for request_id in self._progress:
            if flight := self.requests.get(request_id):
                events.append(ev.Progress(request_id, flight.output_tokens))
        self._progress.clear()
        return events or [ev.Woke()]

    def _count(self, actions: Sequence[ev.Action], now: float) -> None:
        """Sends that stand: one that was turned away in the same pass is counted where it went instead."""
        for send in {action.request.id: action for action in actions if type(action) is ev.Send}.values():
            flight = self.requests.get(send.request.id)
            if flight is not None and flight.state is State.SENT:
                self.rates.sent(send.request.model, now, prefill=send.part is not Part.WHOLE)

    # ---- actions: requests ----------------------------------------------------------------------------------------

    def note(self, flight: InFlightRequest, decision: Decision) -> None:
        flight.note(decision)
        request = flight.request
        self.decided[request.tenant, request.slo_class, decision.kind, decision.reason] += 1

    def _send(self, action: ev.Send) -> None:
        flight = self.requests.get(action.request.id)
        if flight is None:  # it ended in this very iteration; its Cancelled is in the next batch
            return
        self.note(flight, action.decision)
        backend = self._backends.get(action.instance_id)
        flight.instance = action.instance_id
        flight.sent_at = self.clock()
        flight.sends += 1
        if backend is None:
            self.push(ev.Failed(flight.request.id, True, f"no instance {action.instance_id}"))
            return
        flight.state = State.SENT
        call = flight.upstream_call(action.rank)
        if action.part is not Part.WHOLE:
            flight.call, flight.paired = call, action.part is Part.PAIR
            if not flight.paired:  # a pair begins when its decode instance is known
                self.transfers.begun(flight.request.id, action.instance_id)
                flight.prefill = self.spawn(self._prefill(flight, backend, call))
            return
        flight.task = self.spawn(relay(flight, backend, call, self))
        if not flight.streamed:
            prefilled = ev.FirstToken(flight.request.id, assumed=True)
            flight.assumes_first_token = asyncio.get_running_loop().call_later(action.prefill_s, self.push, prefilled)

    def _refused(self, action: ev.Refuse) -> None:
        if flight := self.requests.get(action.request.id):
            self.note(flight, action.decision)
            field = action.decision.figures.get("field")
            param = field if isinstance(field, str) else None
            error = ApiError(action.code, refusal(action.decision), param=param, retry_after_s=action.retry_after_s)
            self._refuse(flight, Outcome.FAILED if flight.sends else Outcome.REFUSED, error)

    def _dropped(self, action: ev.Drop) -> None:
        if flight := self.requests.get(action.request.id):
            self.note(flight, action.decision)
            if action.decision.kind == "cancel":
                error = ApiError("cancelled", "The request was cancelled by an operator.")
                self._refuse(flight, Outcome.REFUSED, error)
            else:
                error = ApiError("waiting_time_exceeded", refusal(action.decision))
                self._refuse(flight, Outcome.EXPIRED, error)

    def _unscheduled(self, action: ev.Unscheduled) -> None:
        if flight := self.requests.get(action.request.id):
            self._refuse(flight, Outcome.FAILED, ApiError("internal_error", "The request could not be scheduled."))

    def _given_up(self, action: ev.GiveUp) -> None:
        if flight := self.requests.get(action.request.id):
            self.note(flight, action.decision)
            message = "No engine could decode the answer."
            if action.prefilled:
                message = "The engines that held this request's KV failed."
            self._refuse(flight, Outcome.FAILED, ApiError("no_capacity", message))

    # ---- actions: stages ------------------------------------------------------------------------------------------

    def _place(self, action: ev.Place) -> None:
        flight = self.requests.get(action.request.id)
        if flight is None:
            return
        name, target = flight.request.id, action.target
        backend, call = self._backends.get(target), flight.call
        if backend is None or call is None or (flight.offer is None and not flight.paired):
            self.push(ev.TransferFailed(name, target, "no_instance"))
            return
        self.note(flight, action.decision)
        flight.instance, flight.prefill_instance, flight.moved = target, action.source, None
        self.transfers.placed(action, "placed" if call.streamed and not flight.paired else "moving")
        leg = DecodeLeg(self, target, self.transfers, self.rates, backend.capabilities)
        if flight.paired:
            flight.task = self.spawn(self._both(flight, call, action, leg))
            self.push(ev.TransferStarted(name, target))
            return
        there = replace(call, rank=action.rank, offer=flight.offer or b"")
        flight.task = self.spawn(relay(flight, backend, there, leg))
        if call.streamed:
            return  # its headers say that it has begun
        self.push(ev.TransferStarted(name, target))
        if not backend.capabilities.tells_landing:
            self.push(ev.TransferDone(name, target, assumed=True))

    def _abort(self, action: ev.Abort) -> None:
        """Its decode stage there, and a prefill begun with it: the request itself goes on."""
        flight = self.requests.get(action.request_id)
        if flight is None or not flight.prefill_instance or flight.instance != action.instance_id:
            return
        if flight.paired:
            flight.stop_prefill()
        if flight.task is not None:
            flight.stop_answer()
            self.transfers.undone(flight, action.reason or "undone", self.clock())
        if action.reason == "prefill_failed":  # nothing of it is left
            flight.instance = flight.prefill_instance
            flight.restart()

    def _prefill_again(self, action: ev.PrefillAgain) -> None:
        if flight := self.requests.get(action.request.id):
            self.note(flight, action.decision)
            self._stop_stages(flight)
            flight.restart()

    def _stop_stages(self, flight: InFlightRequest) -> None:
        """All that runs of it, and what is remembered of its transfer."""
        source = flight.prefill_instance or flight.instance
        if flight.stop_prefill() and not flight.paired:
            self.transfers.free(flight.request.id, source)  # its engine may just have ended it
        flight.stop_answer()
        self.transfers.forget(flight, self.clock())

    # ---- prefills and pairs ---------------------------------------------------------------------------------------

    async def _prefill(self, flight: InFlightRequest, backend: Backend, call: UpstreamCall) -> None:
        """One leg. Of a pair its end says that the KV was taken."""
        source, me = backend.spec.id, asyncio.current_task()
        try:
            if flight.paired:
                prefilled = await backend.prefill(call)
            else:
                prefilled = await backend.prefill(call, partial(self._ending, flight, source))
        except EngineError as error:
            if flight.prefill is me:
                flight.prefill = None
                self._prefill_lost(flight, source, error)
            return
        if flight.prefill is not me:
            return
        flight.prefill = None
        if prefilled.done:
            self._answer_whole(flight, backend, call)
            return
        flight.offer = prefilled.offer
        self._prefilled(flight, source)
        self.push(ev.PrefillDone(flight.request, source, flight.request.prompt_tokens))
        if flight.paired and not flight.streamed:  # its answer shows no first token
            self.push(ev.TransferDone(flight.request.id, flight.instance))

    def _ending(self, flight: InFlightRequest, source: str, offer: bytes) -> None:
        """Its prompt is nearly computed, and its KV may be pulled."""
        if flight.state is State.SENT:
            flight.offer = offer
            self.push(ev.PrefillEnding(flight.request.id, source))

    def _prefilled(self, flight: InFlightRequest, source: str) -> None:
        request, now = flight.request, self.clock()
        self.rates.prefilled(request.model, now)
        figures: dict[str, Figure] = {"instance": source, "tokens": request.prompt_tokens}
        self.note(flight, Decision("prefill", "prefilled", request.id, now, figures))

    def _answer_whole(self, flight: InFlightRequest, backend: Backend, call: UpstreamCall) -> None:
        """Nothing is left to decode. One token is cheap to ask for once more, as the client wants it framed."""
        if flight.task is not None:
            flight.stop_answer()
            self.transfers.undone(flight, "undone", self.clock())
        flight.instance, flight.prefill_instance = backend.spec.id, ""
        flight.call = flight.offer = None
        self.push(ev.AnsweredWhole(flight.request.id, backend.spec.id))
        flight.task = self.spawn(relay(flight, backend, call, self))

    async def _both(self, flight: InFlightRequest, call: UpstreamCall, place: ev.Place, leg: DecodeLeg) -> None:
        """Both stages of a pair, with a room of their own."""
        prefiller, decoder = self._backends.get(place.source), self._backends.get(place.target)
        try:
            if prefiller is None or decoder is None:
                raise EngineError(f"instance {place.source if prefiller is None else place.target} is gone")
            offer = await prefiller.meeting()
        except EngineError as error:
            flight.task = None  # this one
            self._prefill_lost(flight, place.source, error)
            return
        there = replace(call, offer=offer)
        flight.stop_prefill()
        flight.prefill = self.spawn(self._prefill(flight, prefiller, there))
        await relay(flight, decoder, replace(there, rank=place.rank), leg)

    def _prefill_lost(self, flight: InFlightRequest, source: str, error: EngineError) -> None:
        """What follows is the scheduler's to say where a decode stage is at work already."""
        needed = flight.state is State.SENT and flight.moved is None  # else the decode engine has all KV
        if flight.state is State.ENDED:
            return
        if flight.task is None or (needed and error.client_fault):
            flight.stop_answer()
            self.transfers.undone(flight, "prefill_failed", self.clock())
            flight.instance, flight.prefill_instance = source, ""
            self.lost(flight, error)
            return
        if not needed:
            if self.transfers.under_way(flight):  # of a stream, before its first token
                self.transfers.landed(flight, flight.moved, self.clock())
                self.push(ev.TransferDone(flight.request.id, flight.instance, flight.moved, released=True))
            self._prefilled(flight, source)
        flight.offer = None
        self.push(ev.PrefillFailed(flight.request.id, source, str(error)))
        if error.unreachable:
            self._suspect(source)

    def _decode_lost(self, flight: InFlightRequest, error: EngineError) -> None:
        """The decode engine failed before its first byte reached the client."""
        reason = reason_of(error)
        request, target = flight.request, flight.instance
        log.warning("decode of %s on %s: %s (%s)", request.id, target, error, reason)
        self.transfers.failed(flight, reason, error, self.clock())
        if flight.paired:
            flight.stop_prefill()
        if error.client_fault if flight.paired else asks_wrong(error):
            flight.instance, flight.prefill_instance = flight.prefill_instance, ""
            self._rejected(flight, error)
        else:
            self.push(ev.TransferFailed(request.id, target, told_migrator(error)))

    # ---- ends -----------------------------------------------------------------------------------------------------

    def _rejected(self, flight: InFlightRequest, error: EngineError) -> None:
        """It is the request that is at fault: no engine would take it."""
        self.push(ev.Cancelled(flight.request.id))
        self._end(flight, Outcome.REFUSED, code=ENGINE_REJECTED, status=error.status)
        self.spawn(end_with_error(flight, engine_refusal(error.status, error.body), started=False))

    def _refuse(self, flight: InFlightRequest, outcome: Outcome, error: ApiError) -> None:
        started = flight.state is State.ANSWERING
        self._end(flight, outcome, code=error.code, status=200 if started else error.status)
        self.spawn(end_with_error(flight, error, started=started))

    def _end(self, flight: InFlightRequest, outcome: Outcome, *, code: str = "", status: int = 200) -> None:
        flight.state = State.ENDED
        self._stop_stages(flight)
        del self.requests[flight.request.id]
        # Judging and recording take as long as all else at the end of a request: the last bytes leave before it.
        ended = partial(self._outcomes.ended, flight, outcome, self.clock(), code=code, status=status)
        asyncio.get_running_loop().call_soon(ended)

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
        for flight in list(self.requests.values()):
            outcome = Outcome.FAILED if flight.sends else Outcome.REFUSED
            self.push(ev.Cancelled(flight.request.id))
            self._refuse(flight, Outcome.CUT if flight.state is State.ANSWERING else outcome, shutting_down())

    async def drain(self, timeout_s: float) -> None:
        """Wait for open writes at shutdown."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)


def report_defect(who: str, events: Sequence[ev.Event], error: Exception) -> None:
    """A policy raised. The scheduler goes on without what it would have decided."""
    what = repr(events[0]) if len(events) == 1 else f"{len(events)} events"
    log.error("the %s failed on %s", who, what, exc_info=error)


def _needs(flight: InFlightRequest, instance_id: str) -> bool:
    holds = flight.state is State.SENT and flight.prefill_instance == instance_id
    return holds or (flight.state is not State.QUEUED and flight.instance == instance_id)
