"""An executor without a device: it spends in real time what the latency profile says, and makes up the tokens.

Timers come late. To keep the emulated device at its own pace, a step that follows another directly begins where that
one ended, not where the timer fired, so lateness does not add up. What can be made good is one step's own duration, as
on a device whose next step is already queued while the host is late; a longer stall of the host is lost time there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from controller.core.steps import Sampled, Seq, Sink, Step, StepDone
from workers.engine.profiles import Profile
from workers.engine.pseudo_text import natural_length, token_at
from workers.engine.tokenizer import EOS


class Timer(Protocol):
    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` at `when` or soon after; returns what cancels it. Never runs it from inside this call."""
        ...


class EmulatedExecutor:
    """One step at a time. All on the timer's thread."""

    def __init__(self, profile: Profile, timer: Timer, sink: Sink) -> None:
        self._profile = profile
        self._timer = timer
        self._sink = sink
        self._due = 0.0
        self._following = False  # inside the sink's call: the next step was there when this one ended
        self._cancel: Callable[[], None] | None = None

    def start(self, step: Step) -> None:
        if self._cancel is not None:
            raise RuntimeError("a step is running")
        now = self._timer.now()
        seconds = self._profile.seconds(step)
        begin = max(self._due, now - seconds) if self._following else now
        self._due = begin + seconds
        self._cancel = self._timer.call_at(self._due, lambda: self._finish(step, seconds))

    def close(self) -> None:
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def _finish(self, step: Step, seconds: float) -> None:
        self._cancel = None
        sampled = [self._sample(chunk.seq) for chunk in step.chunks if chunk.last]
        sampled += [self._sample(seq) for seq in step.decodes]
        self._following = True
        try:
            self._sink(StepDone(step.id, sampled, seconds))
        finally:
            self._following = False

    def _sample(self, seq: Seq) -> Sampled:
        index = seq.output_tokens
        if not seq.ignore_eos and index + 1 >= max(natural_length(seq.seed), seq.min_tokens + 1):
            return Sampled(seq, EOS, eos=True)
        return Sampled(seq, token_at(seq.seed, index))
