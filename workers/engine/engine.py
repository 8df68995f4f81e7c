"""The driver of the engine scheduler: passes events to it, its steps to the executor, and tokens to the streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from controller.core.estimates import ToldBounds
from controller.core.steps import (
    Aborted,
    Added,
    CacheReset,
    Discard,
    Emit,
    EngineAction,
    EngineEvent,
    Executor,
    Finish,
    FinishReason,
    Paused,
    Reject,
    Reserve,
    Reserved,
    Resume,
    Resumed,
    Seq,
    SeqState,
    Start,
    Step,
    StepDone,
    Suspend,
    Suspended,
)
from controller.engine import EngineScheduler
from workers.engine.errors import HttpError
from workers.engine.metrics import Metrics
from workers.engine.text.streams import Stream

DEVICE_POLL_S = 0.002
logger = logging.getLogger("workers.engine")


class LoopTimer:
    """Monotonic seconds and the running event loop's timers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        delay = when - time.monotonic()
        handle = self._loop.call_later(delay, callback) if delay > 0 else self._loop.call_soon(callback)
        return handle.cancel


class Engine:
    """The engine, on one event loop. `clock`: that of the executor's timer."""

    def __init__(self, model: str, scheduler: EngineScheduler, clock: Callable[[], float]) -> None:
        self.config = scheduler.config
        self.scheduler = scheduler
        self.metrics = Metrics(model, self.config, scheduler)
        self.closing = False
        self.refusing = False  # paused in a mode that does not queue
        self.failed = False  # after a defect the engine serves nothing any more
        self.failure = "a defect"  # its error
        self.on_device = False  # a step is running
        self._busy_s = 0.0  # device time of ended steps
        self._busy_from = 0.0  # when the running step began
        self.on_failure: Callable[[], None] = lambda: None
        # Timer for schedulers that ask for a wake-up.
        self.call_at: Callable[[float, Callable[[], None]], Callable[[], None]] | None = None
        self.on_start: Callable[[Step], None] | None = None  # called with each step that starts
        self.on_resume: Callable[[int], None] | None = None  # called with each suspended step that runs again
        self.computing: int | None = None  # the running step, unless it was asked to stop
        self._wake_at: float | None = None
        self._cancel_wake: Callable[[], None] = lambda: None
        self._clock = clock
        self._executor: Executor | None = None
        self._streams: dict[str, Stream] = {}
        self._ended: asyncio.Future[None] | None = None  # set when the next sequence ends, if a caller waits for that
        self._serial = 0

    def attach(self, executor: Executor) -> None:
        """Set the executor. It is created after the engine, since its sink is `handle`."""
        self._executor = executor

    def now(self) -> float:
        return self._clock()

    def next_id(self, name: str) -> str:
        """An id for a sequence, unique even if clients choose the same name."""
        self._serial += 1
        return f"{name}-{self._serial}"

    def exchange(self, scheduler: EngineScheduler) -> None:
        """Another scheduler, with the blocks and counts of the present one, which must be idle."""
        self.scheduler = scheduler
        self.metrics.follow(scheduler)
        self._wake(None)

    # ---- called by the HTTP side ----------------------------------------------------------------------------------

    def submit(self, stream: Stream) -> None:
        """Queue the stream's sequence. Raises HttpError (503); then nothing is queued."""
        self._refuse_if_down()
        self._streams[stream.seq.id] = stream
        self.handle(Added(stream.seq))
        if stream.seq.id not in self._streams:
            raise HttpError("the engine's queue is full (--max-num-queued-reqs)", status=503)

    def _refuse_if_down(self) -> None:
        if self.failed:
            raise HttpError("the engine has failed", status=500)
        if self.closing or self.refusing:
            raise HttpError("the engine is shutting down" if self.closing else "the engine is paused", status=503)

    def reserve(self, stream: Stream) -> None:
        """Reserve blocks for KV that will come from another engine. Raises HttpError (503) if none are free now."""
        self._refuse_if_down()
        self._streams[stream.seq.id] = stream
        self.handle(Reserve(stream.seq))
        if stream.seq.id not in self._streams:
            raise HttpError("no free KV blocks for this request", "kv_transfer_params", status=503)

    def borrow(self, seq: Seq) -> bool:
        """Reserve blocks for a prefix that another engine holds; PrefixEnded must follow. False without room, and
        while the engine is paused, since it may have given its KV memory up."""
        if self.failed or self.closing or self.refusing or self.scheduler.paused:
            return False
        self.handle(Reserve(seq, needed=False))
        return seq.state is SeqState.ARRIVING

    def abort(self, seq: Seq, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort a sequence. Does nothing if it was not queued or has ended."""
        if seq.id in self._streams:
            self.handle(Aborted(seq, reason))

    def abort_all(self, names: Sequence[str] = ()) -> None:
        """Abort sequences by the id that a client received ("cmpl-x") or sent ("x"); without names, all."""
        wanted = set(names)
        seqs = [stream.seq for stream in self._streams.values()]
        self._run([Aborted(seq) for seq in seqs if not wanted or wanted.intersection(names_of(seq))])

    def end_if_waiting(self, stream: Stream) -> None:
        """Its waiting time is over: end it unless it has begun."""
        if stream.seq.id in self._streams and stream.seq.scheduled_at is None:
            stream.waited_out = True
            self.abort(stream.seq)

    def tell_bounds(self, bounds: Mapping[str, tuple[int, int]]) -> int:
        """New bounds of answers that run here, by the ids that clients sent. Returns how many there were. The batching
        policy reads them when it weighs a sequence again."""
        told = 0
        for stream in self._streams.values():
            seq, new = stream.seq, bounds.get(names_of(stream.seq)[1])
            if new is not None and seq.estimate is not None and isinstance(seq.estimate.length, ToldBounds):
                seq.estimate.length.tell(min(new[0], seq.max_tokens), min(new[1], seq.max_tokens))
                told += 1
        return told

    def pause(self, release_kv: bool = False) -> None:
        self.handle(Paused(release_kv))

    def resume(self) -> None:
        self.handle(Resumed())

    def reset_cache(self) -> None:
        self.handle(CacheReset())

    async def drained(self) -> None:
        """Return when all current sequences have ended; at once if paused, since then none ends by itself."""
        seqs = [stream.seq for stream in self._streams.values()]
        while not (self.scheduler.paused or self.failed) and any(seq.state is not SeqState.FINISHED for seq in seqs):
            if self._ended is None or self._ended.done():
                self._ended = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._ended)

    async def device_free(self) -> None:
        """Return when no step is running. The caller has paused the engine, so that none starts."""
        while self.on_device and not self.failed:
            await asyncio.sleep(DEVICE_POLL_S)

    def busy_s(self) -> float:
        """Device time since the start, seconds."""
        return self._busy_s + (self._clock() - self._busy_from if self.on_device else 0.0)

    def layers_done(self, step_id: int) -> int:
        return self._device().layers_done(step_id)

    def _takes_device(self, step_id: int, now: float) -> None:
        self.on_device, self._busy_from, self.computing = True, now, step_id

    @property
    def streams(self) -> int:
        return len(self._streams)

    def close(self) -> None:
        self._cancel_wake()
        if self._executor is not None:
            self._executor.close()

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def handle(self, event: EngineEvent) -> None:
        self._run([event])

    def _run(self, events: Sequence[EngineEvent]) -> None:
        if self.failed:
            return
        if self.on_device and any(isinstance(event, StepDone | Suspended) for event in events):
            self._busy_s = self.busy_s()
            self.on_device, self.computing = False, None
        try:
            self._step(events)
        except Exception:
            self._die()
            raise

    def fail(self, error: Exception) -> None:
        """End all sequences, since the executor is broken. The first error is the cause; later ones (a lost rank is
        also reported by its step) are ignored."""
        if self.failed:
            return
        logger.error("the executor failed", exc_info=error)
        self.failure = str(error) or type(error).__name__
        self._die()

    def _die(self) -> None:
        """End all streams; otherwise clients would wait for a step that never ends."""
        self.failed = True
        for stream in self._streams.values():
            stream.end(FinishReason.ABORT)
        self._streams.clear()
        self.on_failure()

    def _step(self, events: Sequence[EngineEvent]) -> None:
        now = self._clock()
        totals = self.scheduler.totals
        before = (totals.prompt, totals.prompt_cached, totals.preemptions)
        stopped: list[EngineEvent] = []
        reply = self.scheduler.handle(events, now)
        for action in reply.actions:
            self._perform(action, now, stopped)
        self._count(before)
        self._wake(reply.wake_at)
        if stopped:
            self._step(stopped)

    def _wake(self, at: float | None) -> None:
        """Call the scheduler without events at `at`, unless an event comes before."""
        if at == self._wake_at:
            return
        self._cancel_wake()
        self._wake_at = at
        if at is not None and self.call_at is not None:
            self._cancel_wake = self.call_at(at, self._woken)

    def _woken(self) -> None:
        self._wake_at = None
        self._run([])

    def _count(self, before: tuple[int, int, int]) -> None:
        totals = self.scheduler.totals
        prompt, cached, preemptions = before
        if totals.prompt != prompt:
            caching = self.config.prefix_caching
            self.metrics.admitted(totals.prompt - prompt, totals.prompt_cached - cached, caching)
        if totals.preemptions != preemptions:
            self.metrics.preempted(totals.preemptions - preemptions)

    def _perform(self, action: EngineAction, now: float, stopped: list[EngineEvent]) -> None:
        match action:
            case Emit():
                self._emit(action, now, stopped)
            case Start(step):
                self.metrics.step(step.tokens)
                self._takes_device(step.id, now)
                self._device().start(step)
                if self.on_start is not None:
                    self.on_start(step)
            case Suspend(step_id):
                self.computing = None
                self._device().suspend(step_id)
            case Resume(step_id):
                self._takes_device(step_id, now)
                self._device().resume(step_id)
                if self.on_resume is not None:
                    self.on_resume(step_id)
            case Discard(step_id):
                self._device().discard(step_id)
            case Finish(seq, reason):
                stream = self._forget(seq, reason, now)
                stream.end(reason)
            case Reserved():
                pass  # `reserve` checks that the stream still exists
            case Reject(seq, code):
                self._streams.pop(seq.id, None)  # a prefix that is only borrowed has no stream
                if code == "queue_full":
                    self.metrics.rejected()
            case _:
                assert_never(action)

    def _device(self) -> Executor:
        if self._executor is None:
            raise RuntimeError("no executor is attached")
        return self._executor

    def _emit(self, action: Emit, now: float, stopped: list[EngineEvent]) -> None:
        seq, token, finish = action
        stream = self._streams[seq.id]
        self.metrics.token(seq, stream.last_at, now)
        stream.last_at = now
        if stream.push(token, finish) and finish is None:
            stopped.append(Aborted(seq, FinishReason.STOP))
        if finish is not None:
            self._forget(seq, stream.finish or finish, now)

    def _forget(self, seq: Seq, reason: FinishReason, now: float) -> Stream:
        self.metrics.finished(seq, reason, now)
        stream = self._streams.pop(seq.id)
        if stream.expiry is not None:
            stream.expiry.cancel()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        return stream


def names_of(seq: Seq) -> tuple[str, str]:
    """The ids of a sequence for clients: as received ("cmpl-x") and as sent ("x")."""
    visible = seq.id.rsplit("-", 1)[0]
    return visible, visible.partition("-")[2]
