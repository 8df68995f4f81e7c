"""The asyncio driver of a Scheduler: events in, actions performed, one wake-up, no polling. It decides nothing.

Events of one loop iteration go to the scheduler in one batch, so an arrival on a fleet with free capacity is sent in
the iteration in which it was read. Acceptance and token progress alone start no pass: they go with the next event, or
after 50 ms.

A disaggregated request has two stages. The prefill instance computes one token and keeps the KV; the decode instance
pulls the KV and streams the answer from its first token on. Where engines give out KV while they compute, it is pulled
during the prefill. Engines that need both stages at once (pairs) get both when the decode stage is placed, with one
room in which they meet. Nothing reaches the client before the first token, so until then any failure can be retried
elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from api.openai.in_flight import REFINE_TOKENS, InFlightRequest, end_with_error, relay
from api.openai.kv_transfers import DecodeLeg, KvTransfers, fault_of, migrator_reason
from api.openai.protocol.errors import ApiError, engine_refusal, key_revoked, shutting_down, workflow_cancelled
from api.openai.protocol.translation import UnreadableAnswer
from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.types import Outcome, Part, Request
from controller.dispatch import Scheduler
from controller.dispatch.lifecycle import ENDS, Cause, State, cause_of, outcome
from controller.scale.traffic import StageRates
from controller.wording.refusals import ended, refusal
from workers.backends.base import Backend, EngineError, UpstreamCall
from workers.workflows import BY_OPERATOR

log = logging.getLogger(__name__)

SERVER_ERROR = 500  # an engine may answer with one before it goes down
FINAL = ("infeasible_alone", "ended_engines", "quarantined")  # reasons for which the same request is refused again
PROGRESS_S = 0.05  # how long token counts may wait for another event to go with

Handle = Callable[[Sequence[ev.Event], float], ev.Reply]
GoesOn = Callable[[InFlightRequest, float, Callable[[Request], Decision]], Request | None]  # `SharedCalls.goes_on`


class Outcomes(Protocol):
    """Is told of every request that ended, exactly once."""

    def ended(
        self, in_flight: InFlightRequest, outcome: Outcome, now: float, *, code: str = "", status: int = 200
    ) -> None: ...


def waited_out(request: Request, instance_id: str, now: float) -> Decision:
    """Its engine, which is sent everything, ended it before it began."""
    figures: dict[str, Figure] = {
        "waited_s": now - request.arrival,
        "hopeless": now > request.due,
        "paused": False,
        "instance": instance_id,
        "instances": 1,
    }
    return Decision("expire", "waiting_time", request.id, now, figures)


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
        """`handle`: the scheduler's, or one that records its calls. `suspect`: is told of an instance that cannot be
        reached or answers with an error of its own. `heard`: is told of the instance of each token, which is therefore
        alive."""
        self.scheduler = scheduler
        self.requests: dict[str, InFlightRequest] = {}
        self.decided: Counter[tuple[str, str, str, str]] = Counter()  # (tenant, class, kind, reason)
        self.to_refine: list[InFlightRequest] = []  # whose bound is to be predicted again, since it was last emptied
        # A call was ended since it waited too long: asked for the request as which it goes on. None: it ends.
        self.goes_on: GoesOn = lambda in_flight, until, decided: None
        self.requeued: Callable[[InFlightRequest], None] = lambda in_flight: None
        self.clock = clock
        self.rates = StageRates()
        self.transfers = KvTransfers(self, backends)
        self._handle = handle
        self.backends = backends
        self._outcomes = outcomes
        self._suspect = suspect
        self._heard = heard
        self._events: list[ev.Event] = []
        self._progress: set[str] = set()
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._overstating: set[str] = set()  # instances whose counts were once too high: said once for each
        self.performs: dict[type, Callable[[Any], None]] = {
            ev.Send: self._send,
            ev.Refuse: self._refused,
            ev.Drop: self._dropped,
            ev.Prune: self._pruned,
            ev.Retry: self._retry,
            ev.Fail: self._failed,
            ev.AnswerThere: self._answer_there,
            ev.Unscheduled: self._unscheduled,
            ev.Place: self._place,
            ev.Abort: self._abort,
            ev.FreeKv: lambda action: self.transfers.free(action.request_id, action.instance_id),
            ev.LeftToLease: self.transfers.left,
            ev.PrefillAgain: self._prefill_again,
            ev.GiveUp: self._given_up,
        }

    # ---- called by the gateway ------------------------------------------------------------------------------------

    def arrive(self, in_flight: InFlightRequest, avoid: frozenset[str] = frozenset()) -> None:
        """`avoid`: instances that are used only if there is no other."""
        self.requests[in_flight.request.id] = in_flight
        self.push(ev.Arrived(in_flight.request, avoid))

    def arrive_again(self, in_flight: InFlightRequest, request: Request, avoid: frozenset[str] = frozenset()) -> None:
        """A request that waits goes on as this one, with its id and targets."""
        self.push(ev.Cancelled(in_flight.request.id))
        del self.requests[in_flight.request.id]
        in_flight.request = request
        self.arrive(in_flight, avoid)

    def hang_up(self, in_flight: InFlightRequest, why: str = "client_closed") -> None:
        """The client is gone, or was hung up on (`why`): cancel the request at its engine at once."""
        if not in_flight.over:
            self._end(in_flight, Cause.HUNG_UP, code=why, status=499)
            self.push(ev.Cancelled(in_flight.request.id))

    def instance_down(self, instance_id: str, why: str, *, died: bool = False) -> None:
        """Report that its calls failed. The scheduler deals with the KV that it kept. `died`: see `ev.InstanceDown`."""
        self.push(ev.InstanceDown(instance_id, died))
        error = EngineError(f"instance {instance_id} is down: {why}")
        for in_flight in [each for each in self.requests.values() if each.instance == instance_id]:
            if in_flight.task is not None:
                in_flight.stop_answer()
                self.lost(in_flight, error, down=True)
            elif in_flight.prefill is not None:
                in_flight.stop_prefill()
                self._prefill_lost(in_flight, instance_id, error, down=True)

    def serving(self, instance_id: str) -> int:
        """How many requests would fail or start over without it, with those whose KV it keeps for another instance."""
        return sum(1 for in_flight in self.requests.values() if self._needs(in_flight, instance_id))

    def _needs(self, in_flight: InFlightRequest, instance_id: str) -> bool:
        if in_flight.prefill_instance == instance_id and not in_flight.started:
            return True
        return in_flight.instance == instance_id and not self.waits(in_flight)

    def waits(self, in_flight: InFlightRequest) -> bool:
        """Whether an open request waits for an instance. One that the scheduler does not know has just arrived."""
        return self.scheduler.state_of(in_flight.request.id) in (State.QUEUED, State.ENDED)

    def push(self, event: ev.Event) -> None:
        self._events.append(event)
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._pass)

    def tell(self, event: ev.Event) -> None:
        """An event that starts no pass of its own."""
        self._events.append(event)
        self._soon_enough()

    # ---- called by the relay --------------------------------------------------------------------------------------

    def accepted(self, in_flight: InFlightRequest) -> None:
        """Acceptance frees no room, so it starts no pass."""
        self.tell(ev.Accepted(in_flight.request.id))

    def pulling(self, in_flight: InFlightRequest) -> None:
        """Nothing to do: only decode stages pull KV (DecodeLeg)."""

    def pulled(self, in_flight: InFlightRequest) -> None:
        """Nothing to do, as above."""

    def first_token(self, in_flight: InFlightRequest, now: float) -> None:
        self._heard(in_flight.instance, now)
        self.push(ev.FirstToken(in_flight.request.id))

    def progressed(self, in_flight: InFlightRequest, now: float) -> None:
        self._heard(in_flight.instance, now)
        self._progress.add(in_flight.request.id)
        self._soon_enough()

    def _soon_enough(self) -> None:
        if self._soon is None and self._later is None:
            self._later = asyncio.get_running_loop().call_later(PROGRESS_S, self._pass)

    def completed(self, in_flight: InFlightRequest, now: float) -> None:
        if in_flight.usage is not None:
            in_flight.output_tokens = in_flight.usage.completion_tokens
            if in_flight.overstated and in_flight.instance not in self._overstating:
                self._overstating.add(in_flight.instance)
                told = (
                    "%s counts more tokens than %s allows; its counts are cut to what the request and its model allow"
                )
                log.warning(told, in_flight.instance, in_flight.request.id)
        in_flight.task = None  # it ends by itself after the last write
        self.push(ev.Finished(in_flight.request.id, in_flight.output_tokens))
        self._end(in_flight, Cause.ANSWERED)

    def lost(self, in_flight: InFlightRequest, error: EngineError, *, down: bool = False) -> None:
        """The call for its answer failed. `down`: because its instance is down."""
        in_flight.task = None
        in_flight.stop_answer()
        if in_flight.prefill_instance and not in_flight.started:
            self.transfers.failed(in_flight, error, self.clock())
            if in_flight.paired:  # both calls of a pair began with one action, and end together
                in_flight.stop_prefill()
        self._report(in_flight, in_flight.instance, error, down=down)

    def _report(self, in_flight: InFlightRequest, instance_id: str, error: EngineError, *, down: bool) -> None:
        """Report what the failed call showed. The scheduler knows what the call was for, and decides what follows."""
        if error.waited_out:
            self._waited_out(in_flight, instance_id)
            return
        log.warning("request %s failed on %s: %s", in_flight.request.id, instance_id, error)
        if error.unreachable or error.status >= SERVER_ERROR:
            self._suspect(instance_id)
        in_flight.error = error
        at_fault = "instance" if down else fault_of(error)
        if not error.client_fault:
            in_flight.identify()
        name, reason = in_flight.request.id, migrator_reason(error)
        self.push(ev.EngineFailed(name, instance_id, str(error), reason, at_fault, error.connection))

    def _waited_out(self, in_flight: InFlightRequest, instance_id: str) -> None:
        """An engine that is sent everything ended it, as the scheduler ends what has waited too long in its queue."""
        now = self.clock()
        if self._went_on(in_flight, in_flight.waits_until, lambda each: waited_out(each, instance_id, now)):
            return
        decision = waited_out(in_flight.request, instance_id, now)
        self.note(in_flight, decision)
        self.push(ev.Cancelled(in_flight.request.id))
        self._refuse(in_flight, Cause.EXPIRED, refusal(decision))

    def _went_on(self, in_flight: InFlightRequest, until: float, decided: Callable[[Request], Decision]) -> bool:
        """Whether it goes on for requests that share it and may wait beyond `until`."""
        again = self.goes_on(in_flight, until, decided)
        if again is not None:
            self._stop_stages(in_flight)
            in_flight.restart()
            self.arrive_again(in_flight, again)
        return again is not None

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        now = self.clock()
        reply = self._handle(self._collect(), now)
        if reply.wake_at is not None:
            self._wake = asyncio.get_running_loop().call_later(max(0.0, reply.wake_at - now), self._woke)
        for action in reply.actions:
            self.performs[type(action)](action)
        if self.scheduler.disaggregated:
            self._count(reply.actions, now)

    def _woke(self) -> None:
        """Queued behind what has happened: a first token seen just now comes before its time-out."""
        self._wake = None
        self.push(ev.Woke())

    def _collect(self) -> list[ev.Event]:
        """The batch of events. Every pass returns a new wake-up, so the timers of the old one are cancelled."""
        for handle in (self._soon, self._later, self._wake):
            if handle is not None:
                handle.cancel()
        self._soon = self._later = self._wake = None
        events, self._events = self._events, []
        for request_id in self._progress:
            if in_flight := self.requests.get(request_id):
                events.append(ev.Progress(request_id, in_flight.output_tokens))
                if in_flight.output_tokens >= in_flight.refine_at:
                    in_flight.refine_at = in_flight.output_tokens + REFINE_TOKENS
                    self.to_refine.append(in_flight)
        self._progress.clear()
        return events or [ev.Woke()]

    def _count(self, actions: Sequence[ev.Action], now: float) -> None:
        """Count what was sent. A request that was sent twice in one pass counts where it went last."""
        for send in {action.request.id: action for action in actions if type(action) is ev.Send}.values():
            in_flight = self.requests.get(send.request.id)
            if in_flight is not None and send.instance_id in self.backends and not self.waits(in_flight):
                self.rates.sent(send.request.model, now, prefill=send.part is not Part.WHOLE)

    # ---- actions: requests ----------------------------------------------------------------------------------------

    def note(self, in_flight: InFlightRequest, decision: Decision) -> None:
        in_flight.note(decision)
        request = in_flight.request
        self.decided[request.tenant, request.slo_class, decision.kind, decision.reason] += 1

    def _send(self, action: ev.Send) -> None:
        in_flight = self.requests.get(action.request.id)
        if in_flight is None:  # it ended in this iteration; its Cancelled is in the next batch
            return
        self.note(in_flight, action.decision)
        backend = self.backends.get(action.instance_id)
        in_flight.instance = action.instance_id
        in_flight.sent_at = self.clock()
        in_flight.sends += 1
        if backend is None:
            # It has left the configuration meanwhile: for the scheduler a failed call like any other, which it retries.
            self.push(ev.EngineFailed(in_flight.request.id, action.instance_id, f"no instance {action.instance_id}"))
            return
        call = in_flight.upstream_call(action.rank, whole=action.part is Part.WHOLE)
        if action.part is not Part.WHOLE:
            in_flight.call, in_flight.paired, in_flight.two_stages = call, action.part is Part.PAIR, True
            if not in_flight.paired:  # a pair starts when its decode instance is known
                self.transfers.begun(in_flight.request.id, action.instance_id)
                in_flight.prefill = self.spawn(self._prefill(in_flight, backend, call))
            return
        in_flight.task = self.spawn(relay(in_flight, backend, call, self))
        if not in_flight.streamed:  # nothing will show its first token, and until then it counts as prefilling
            prefilled = ev.FirstToken(in_flight.request.id, assumed=True)
            in_flight.assumes_first_token = asyncio.get_running_loop().call_later(
                action.prefill_s, self.push, prefilled
            )

    def _refused(self, action: ev.Refuse) -> None:
        if in_flight := self.requests.get(action.request.id):
            self.note(in_flight, action.decision)
            field = action.decision.figures.get("field")
            param = field if isinstance(field, str) else None
            error = ApiError(
                action.code,
                refusal(action.decision),
                param=param,
                retry_after_s=action.retry_after_s,
                final=action.decision.reason in FINAL,
            )
            self._end_with_error(in_flight, cause_of(action), error)

    def _dropped(self, action: ev.Drop) -> None:
        if in_flight := self.requests.get(action.request.id):
            self.note(in_flight, dropped := action.decision)
            expired = (cause := cause_of(action)) is Cause.EXPIRED
            if not (expired and self._went_on(in_flight, self.clock(), lambda each: dropped._replace(subject=each.id))):
                self._refuse(in_flight, cause, refusal(dropped) if expired else "")

    def _pruned(self, action: ev.Prune) -> None:
        if in_flight := self.requests.get(action.request.id):
            self.note(in_flight, action.decision)

    def _unscheduled(self, action: ev.Unscheduled) -> None:
        if in_flight := self.requests.get(action.request.id):
            self._refuse(in_flight, cause_of(action))

    def _given_up(self, action: ev.GiveUp) -> None:
        if in_flight := self.requests.get(action.request.id):
            self.note(in_flight, action.decision)
            self._refuse(in_flight, cause_of(action))

    # ---- actions: stages ------------------------------------------------------------------------------------------

    def _place(self, action: ev.Place) -> None:
        in_flight = self.requests.get(action.request.id)
        if in_flight is None:
            return
        name, target = in_flight.request.id, action.target
        backend, call = self.backends.get(target), in_flight.call
        if backend is None or call is None or (in_flight.offer is None and not in_flight.paired):
            self.push(ev.TransferFailed(name, target, "no_instance"))
            return
        self.note(in_flight, action.decision)
        in_flight.instance, in_flight.prefill_instance, in_flight.moved = target, action.source, None
        # Only a stream says that blocks are reserved and that KV begins to move.
        self.transfers.placed(action, moves=in_flight.paired or not call.streamed)
        leg = DecodeLeg(self, target, self.transfers, self.rates, backend.capabilities)
        if in_flight.paired:
            in_flight.task = self.spawn(self._both(in_flight, call, action, leg))
            self.push(ev.TransferStarted(name, target))
            return
        there = replace(in_flight.later(call, self.clock()), rank=action.rank, offer=in_flight.offer or b"")
        in_flight.task = self.spawn(relay(in_flight, backend, there, leg))
        if call.streamed:
            return  # its headers will show that it has begun
        self.push(ev.TransferStarted(name, target))
        if not backend.capabilities.tells_landing:
            self.push(ev.TransferDone(name, target, assumed=True))

    def _abort(self, action: ev.Abort) -> None:
        """Abort its decode stage there, and a prefill that began with it. The request itself goes on."""
        in_flight = self.requests.get(action.request_id)
        if in_flight is None or not in_flight.prefill_instance or in_flight.instance != action.instance_id:
            return
        if in_flight.paired:
            in_flight.stop_prefill()
        if in_flight.task is not None:
            in_flight.stop_answer()
            self.transfers.undone(in_flight, action.reason or "undone", self.clock())

    def _retry(self, action: ev.Retry) -> None:
        if in_flight := self.requests.get(action.request.id):
            in_flight.stop_prefill()
            self._stop_decode(in_flight)
            in_flight.restart()
            self.requeued(in_flight)

    def _stop_decode(self, in_flight: InFlightRequest) -> None:
        """What is left of it is its prefill instance, if it had two stages."""
        in_flight.stop_answer()
        if in_flight.prefill_instance:
            self.transfers.undone(in_flight, "prefill_failed", self.clock())
            in_flight.instance, in_flight.prefill_instance = in_flight.prefill_instance, ""

    def _prefill_again(self, action: ev.PrefillAgain) -> None:
        if in_flight := self.requests.get(action.request.id):
            self.note(in_flight, action.decision)
            self._stop_stages(in_flight)
            in_flight.restart()
            self.requeued(in_flight)

    def _stop_stages(self, in_flight: InFlightRequest) -> None:
        """Stop both stages, and forget its transfer. What KV is to be freed then, the scheduler decides (FreeKv)."""
        in_flight.stop_prefill()
        in_flight.stop_answer()
        if in_flight.two_stages:
            self.transfers.forget(in_flight, self.clock())

    # ---- prefills and pairs ---------------------------------------------------------------------------------------

    async def _prefill(self, in_flight: InFlightRequest, backend: Backend, call: UpstreamCall) -> None:
        """The prefill stage. For a pair its end means that the KV was taken."""
        source, me = backend.spec.id, asyncio.current_task()
        try:
            ending = None if in_flight.paired else partial(self._ending, in_flight, source)
            prefilled = await backend.prefill(call, ending)
        except EngineError as error:
            if in_flight.prefill is me:
                in_flight.prefill = None
                self._prefill_lost(in_flight, source, error)
            return
        if in_flight.prefill is not me:  # stopped or replaced while its answer was on the way
            return
        in_flight.prefill = None
        if prefilled.borrowed is not None:
            self.transfers.borrowed(in_flight, source, prefilled.borrowed, self.clock())
        if prefilled.done:  # the answer ended with its first token, so there is nothing to decode
            if in_flight.task is not None:
                in_flight.stop_answer()
                self.transfers.undone(in_flight, "undone", self.clock())
            self.push(ev.AnsweredWhole(in_flight.request.id, source))
            return
        in_flight.offer = prefilled.offer
        self._prefilled(in_flight, source)
        self.push(ev.PrefillDone(in_flight.request, source, in_flight.request.prompt_tokens))
        if in_flight.paired and not in_flight.streamed:  # its answer shows no first token
            self.push(ev.TransferDone(in_flight.request.id, in_flight.instance))

    def _ending(self, in_flight: InFlightRequest, source: str, offer: bytes) -> None:
        """Its prompt is nearly computed, so its KV may be pulled."""
        if not in_flight.over:
            in_flight.offer = offer
            self.push(ev.PrefillEnding(in_flight.request.id, source))

    def _prefilled(self, in_flight: InFlightRequest, source: str) -> None:
        request, now = in_flight.request, self.clock()
        self.rates.prefilled(request.model, now)
        figures: dict[str, Figure] = {"instance": source, "tokens": request.prompt_tokens}
        self.note(in_flight, Decision("prefill", "prefilled", request.id, now, figures))

    def _answer_there(self, action: ev.AnswerThere) -> None:
        in_flight, backend = self.requests.get(action.request.id), self.backends.get(action.instance_id)
        if in_flight is None or in_flight.call is None:
            return
        in_flight.instance, in_flight.prefill_instance = action.instance_id, ""
        call, in_flight.call, in_flight.offer = in_flight.call, None, None
        if backend is None:
            self.push(ev.EngineFailed(in_flight.request.id, action.instance_id, f"no instance {action.instance_id}"))
            return
        in_flight.task = self.spawn(relay(in_flight, backend, call, self))

    async def _both(self, in_flight: InFlightRequest, call: UpstreamCall, place: ev.Place, leg: DecodeLeg) -> None:
        """Both stages of a pair, with a new room in which they meet."""
        prefiller, decoder = self.backends.get(place.source), self.backends.get(place.target)
        try:
            if prefiller is None or decoder is None:
                raise EngineError(f"instance {place.source if prefiller is None else place.target} is gone")
            offer = await prefiller.meeting()
        except EngineError as error:
            in_flight.task = None  # the present task
            self._prefill_lost(in_flight, place.source, error)
            return
        there = replace(call, offer=offer)
        in_flight.stop_prefill()
        in_flight.prefill = self.spawn(self._prefill(in_flight, prefiller, there))
        await relay(in_flight, decoder, replace(there, rank=place.rank), leg)

    def _prefill_lost(self, in_flight: InFlightRequest, source: str, error: EngineError, *, down: bool = False) -> None:
        """The call for its prefill failed, which its decode engine may not need any more."""
        if in_flight.over:
            return
        if in_flight.started or in_flight.moved is not None:
            self._prefilled(in_flight, source)  # for the record: what its decode engine has was computed
        in_flight.offer = None
        self._report(in_flight, source, error, down=down)

    # ---- ends -----------------------------------------------------------------------------------------------------

    def _failed(self, action: ev.Fail) -> None:
        in_flight = self.requests.get(action.request.id)
        if in_flight is None:
            return
        cause, error = cause_of(action), in_flight.error
        if cause is Cause.REJECTED and error is not None:
            self._stop_decode(in_flight)  # its record names the instance that prefilled it
            self._end(in_flight, cause, status=error.status)
            self.spawn(end_with_error(in_flight, engine_refusal(error.status, error.body), started=False))
        else:
            self._refuse(in_flight, cause, str(error) if isinstance(error, UnreadableAnswer) else "")

    def _refuse(self, in_flight: InFlightRequest, cause: Cause, message: str = "") -> None:
        self._end_with_error(in_flight, cause, ApiError(ENDS[cause].code, message or ended(cause)))

    def _end_with_error(self, in_flight: InFlightRequest, cause: Cause, error: ApiError) -> None:
        started = in_flight.started
        self._end(in_flight, cause, code=error.code, status=200 if started else error.status)
        self.spawn(end_with_error(in_flight, error, started=started))

    def _end(self, in_flight: InFlightRequest, cause: Cause, *, code: str = "", status: int = 200) -> None:
        """`code`: the error code, if it is not that of the cause."""
        found = outcome(cause, sent=in_flight.sends > 0, answering=in_flight.started)
        code = code or ENDS[cause].code
        in_flight.over = True
        self._stop_stages(in_flight)
        del self.requests[in_flight.request.id]
        # Judging and recording take as long as all else at the end of a request, so the last bytes are sent first.
        told = partial(self._outcomes.ended, in_flight, found, self.clock(), code=code, status=status)
        asyncio.get_running_loop().call_soon(told)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run as a task that is kept until it is done; exceptions are logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request's task failed", exc_info=error)

    def give_up(self) -> None:
        """The gateway stops: every open request ends, with a record and an error its client understands."""
        for in_flight in list(self.requests.values()):
            self.push(ev.Cancelled(in_flight.request.id))
            self._end_with_error(in_flight, Cause.SHUTDOWN, shutting_down())

    def end_revoked(self, key_ids: Container[int]) -> None:
        """These API keys were revoked: what they asked for ends, queued or streaming."""
        for in_flight in list(self.requests.values()):
            if in_flight.key_id in key_ids:
                self.push(ev.Cancelled(in_flight.request.id))
                self._end_with_error(in_flight, Cause.KEY_REVOKED, key_revoked())

    def end_workflow(self, tenant: str, workflow: str, by: str) -> None:
        """The workflow was cancelled: what is open of it ends, queued or streaming. `by`: of `workers.workflows`."""
        cause, reason = workflow_end(by)
        for in_flight in list(self.requests.values()):
            request = in_flight.request
            if request.workflow == workflow and request.tenant == tenant:
                self.note(in_flight, Decision("cancel", reason, workflow, self.clock(), {}))
                self.push(ev.Cancelled(request.id))
                self._end_with_error(in_flight, cause, workflow_cancelled(workflow, by))

    async def drain(self, timeout_s: float) -> None:
        """Wait for open writes, at shutdown."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)


def workflow_end(by: str) -> tuple[Cause, str]:
    """How a request ends whose workflow was cancelled, and the reason of that decision."""
    asked_by_client = by != BY_OPERATOR
    cause = Cause.WORKFLOW_CANCELLED if asked_by_client else Cause.CANCELLED
    reason = "workflow_cancelled" if asked_by_client else "workflow_cancelled_by_operator"
    return cause, reason


def report_defect(who: str, events: Sequence[ev.Event], error: Exception) -> None:
    """A policy raised. The scheduler goes on without its decision."""
    log.error("the %s failed on %s", who, events[0] if len(events) == 1 else f"{len(events)} events", exc_info=error)
