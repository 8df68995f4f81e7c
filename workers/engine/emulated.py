"""An executor without a device: each step takes the time that the latency profile predicts, and tokens are generated
from a seed.

Timers fire late. So that lateness does not add up, a step that directly follows another one begins when that one was
due, not when its timer fired. At most one step's own duration is caught up, as on a device whose next step is already
queued while the host is late; a longer stall of the host is lost time on a real device too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from controller.core.steps import Sampled, Seq, Sink, Step, StepDone, Suspended
from controller.predict.boundaries import StepBoundaries
from workers.engine.emulated_swap import EmulatedSwap
from workers.engine.profiles import Profile
from workers.engine.text.pseudo_text import natural_length, token_at
from workers.engine.text.tokenizer import EOS


class Timer(Protocol):
    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` at `when` or soon after, never from inside this call. Returns a function that cancels it."""
        ...


@dataclass(slots=True)
class EmulatedWork:
    """A running or suspended step. `used` of its `seconds` were done before `since`, when it last began."""

    step: Step
    seconds: float
    used: float = 0.0
    since: float = 0.0
    stopping_at: float | None = None  # device seconds at which it will be suspended


class EmulatedExecutor:
    """Runs one step at a time, on the timer's thread. `layers`: of the emulated model; all take equally long."""

    def __init__(
        self,
        profile: Profile,
        timer: Timer,
        sink: Sink,
        boundaries: StepBoundaries | None = None,
        layers: int = 0,
        swap: EmulatedSwap | None = None,
    ) -> None:
        """`swap`: the emulated link to host memory; None: it has none."""
        self._profile, self._swap = profile, swap
        self._timer = timer
        self._sink = sink
        self._boundaries = boundaries
        self._layers = layers
        self._due = 0.0
        self._following = False  # inside the sink's call, so a step started now follows directly
        self._cancel: Callable[[], None] | None = None
        self._running: EmulatedWork | None = None
        self._suspended: dict[int, EmulatedWork] = {}

    def start(self, step: Step) -> None:
        self._begin(EmulatedWork(step, self._profile.seconds(step) + sum(self._swap_s(step))))

    def suspend(self, step_id: int) -> None:
        work = self._running
        if work is None or work.step.id != step_id or work.stopping_at is not None:
            return  # it has just ended, or is already stopping
        if self._boundaries is None:
            return
        used = min(work.seconds, work.used + max(0.0, self._timer.now() - work.since))
        stop = self._boundaries.next_boundary(work.step, work.seconds, used)
        if stop >= work.seconds:
            return
        work.stopping_at = stop
        self._go_on(work)

    def resume(self, step_id: int) -> None:
        work = self._suspended.pop(step_id, None)
        if work is None:
            raise RuntimeError(f"step {step_id} is not suspended")
        self._begin(work)

    def discard(self, step_id: int) -> None:
        if self._suspended.pop(step_id, None) is None:
            raise RuntimeError(f"step {step_id} is not suspended")

    def layers_done(self, step_id: int) -> int:
        work = self._running
        if work is None or work.step.id != step_id:
            work = self._suspended.get(step_id)
        if work is None or work.seconds <= 0:
            return 0
        since = max(0.0, self._timer.now() - work.since) if work is self._running else 0.0
        # A step that stopped before a layer has passed all those before it, whatever the rounding.
        return min(self._layers, int(self._layers * (work.used + since) / work.seconds + 1e-9))

    def close(self) -> None:
        if self._cancel is not None:
            self._cancel()
        self._cancel, self._running = None, None
        self._suspended.clear()

    def _begin(self, work: EmulatedWork) -> None:
        if self._running is not None:
            raise RuntimeError("a step is running")
        now, left = self._timer.now(), work.seconds - work.used
        work.since = max(self._due, now - left) if self._following else now
        self._running = work
        self._go_on(work)

    def _go_on(self, work: EmulatedWork) -> None:
        """Run until it ends, stops where it was asked to, or needs a layer that has not come."""
        until, then = work.seconds, self._finish
        if work.stopping_at is not None:
            until, then = work.stopping_at, self._stopped
        if (come := self._come_s(work)) < until:
            until, then = max(come, work.used), self._lacks
        self._plan(work, work.since + until - work.used, then)

    def _come_s(self, work: EmulatedWork) -> float:
        """Device seconds that it can run with the layers of coming prefixes that are here."""
        come = _layers_here(work.step)
        return math.inf if come is None or come >= self._layers else work.seconds * come / self._layers

    def _plan(self, work: EmulatedWork, due: float, then: Callable[[EmulatedWork], None]) -> None:
        if self._cancel is not None:
            self._cancel()
        self._due = due
        self._cancel = self._timer.call_at(due, lambda: then(work))

    def _lacks(self, work: EmulatedWork) -> None:
        """It has come to the end of what was here when it was planned."""
        come, layers = self._come_s(work), _layers_here(work.step)
        if layers is None or work.since + come - work.used > self._due:
            self._go_on(work)
            return
        work.used, work.stopping_at = max(come, work.used), None
        self._suspended[work.step.id] = work
        self._answer(Suspended(work.step.id, work.used, layers + 1))

    def _stopped(self, work: EmulatedWork) -> None:
        if work.stopping_at is None:
            raise RuntimeError("the step was not asked to stop")
        work.used, work.stopping_at = work.stopping_at, None
        self._suspended[work.step.id] = work
        self._answer(Suspended(work.step.id, work.used))

    def _finish(self, work: EmulatedWork) -> None:
        step = work.step
        sampled = [self._sample(chunk.seq) for chunk in step.chunks if chunk.last]
        sampled += [self._sample(seq) for seq in step.decodes]
        self._answer(StepDone(step.id, sampled, work.seconds, *self._swap_s(step)))

    def _swap_s(self, step: Step) -> tuple[float, float]:
        return (0.0, 0.0) if self._swap is None else (self._swap.out_s(step), self._swap.back_s(step))

    def _answer(self, event: StepDone | Suspended) -> None:
        self._cancel, self._running, self._following = None, None, True
        try:
            self._sink(event)
        finally:
            self._following = False

    def _sample(self, seq: Seq) -> Sampled:
        index = seq.output_tokens
        if not seq.ignore_eos and index + 1 >= max(natural_length(seq.seed), seq.min_tokens + 1):
            return Sampled(seq, EOS, eos=True)
        return Sampled(seq, token_at(seq.seed, index))


def _layers_here(step: Step) -> int | None:
    """Layers of every coming prefix that the step reads; None if it reads none."""
    return min((chunk.seq.coming.layers for chunk in step.chunks if chunk.seq.coming is not None), default=None)
