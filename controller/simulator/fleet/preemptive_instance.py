"""A simulated prefill engine that can suspend a running step: FlowPrefill's scheduler on an emulated device.

The device answers a suspend at the boundary that `controller.predict.boundaries` gives for the step. A suspended step
keeps the seconds that it has used, and takes the rest after it is resumed. Switching costs nothing, which the paper
measures as negligible (sec. 6.5, Fig. 14). There are no leaps, since prompts have no equal steps. Like the reference
engine, it reports that a prompt is nearly computed when three quarters of its last step have passed; if prompts are cut
into chunks, when the last chunk begins.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from controller.core.steps import (
    NEARLY_COMPUTED,
    Discard,
    EngineAction,
    EngineEvent,
    Resume,
    Seq,
    SeqState,
    Start,
    Step,
    StepsDone,
    Suspend,
    Suspended,
)
from controller.predict.boundaries import StepBoundaries, sums
from controller.simulator.fleet.instance import SimulatedInstance
from controller.simulator.fleet.tokens import Track
from controller.simulator.settings import InstanceSettings

ROUNDING = 1e-9  # seconds


@dataclass(slots=True)
class Work:
    """`used` of its `seconds` were done before `since`, when it last began. It will stop at `until` device seconds.

    `ending`: prompts with `keep_kv`, until they are reported as nearly computed, at `near` device seconds.
    """

    step: Step
    seconds: float
    until: float
    used: float = 0.0
    since: float = 0.0
    near: float = 0.0
    ending: list[Seq] = field(default_factory=list)

    @property
    def near_at(self) -> float | None:
        """When to report it; None: reported already, or this part ends before."""
        return self.since + max(0.0, self.near - self.used) if self.ending and self.until == self.seconds else None

    @property
    def ends_at(self) -> float:
        return self.since + (self.until - self.used)


class PreemptiveInstance(SimulatedInstance):
    """`due`: the end of the step, its stop at a boundary, or the scheduler's wake-up, whichever is first."""

    def __init__(self, instance_id: str, settings: InstanceSettings, up_at: float, leaps: bool) -> None:
        super().__init__(instance_id, settings, up_at, leaps=False)
        self.boundaries: StepBoundaries = settings.build_boundaries()
        self._work: Work | None = None
        self._suspended: dict[int, Work] = {}
        self._wake_at: float | None = None
        self._near = NEARLY_COMPUTED if self.engine.whole_prompts else 0.0

    def tell(self, events: Sequence[EngineEvent], now: float) -> list[EngineAction]:
        reply = self.engine.handle(events, now)
        others: list[EngineAction] = []
        for action in reply.actions:
            match action:
                case Start(step):
                    seconds = self.latency.step(*sums(step), len(step.decodes), step.context_sum)
                    ending = [chunk.seq for chunk in step.chunks if chunk.last and chunk.seq.keep_kv]
                    self._go(Work(step, seconds, seconds, near=self._near * seconds, ending=ending), now)
                case Resume(step_id):
                    self._go(self._suspended.pop(step_id), now)
                case Suspend():
                    self._stop(now)
                case Discard(step_id):
                    del self._suspended[step_id]
                case _:
                    others.append(action)
        self._tell_nearly_computed(now)
        self._wake_at = reply.wake_at
        work = self._work
        times = [self._wake_at, *((work.ends_at, work.near_at) if work else ())]
        self.due = min((max(now, at) for at in times if at is not None), default=None)
        self.version += 1
        return others

    def complete(self, now: float) -> tuple[list[Seq], list[EngineAction]]:
        work = self._work
        if work is None or now < work.ends_at:
            return [], self.tell([], now)
        self._work = None
        self.busy_s += now - work.since
        step = work.step
        if work.until < work.seconds:
            work.used, work.until = work.until, work.seconds
            self._suspended[step.id] = work
            return [], self.tell([Suspended(step.id, work.used)], now)
        started = [chunk.seq for chunk in step.chunks if chunk.last]
        first = [seq for seq in started if seq.output_tokens == 0]
        for seq in started:
            self.tracks.setdefault(seq.id, Track()).begin(len(self.step_ends), seq.output_tokens)
        for seq in (*started, *step.decodes):
            self.tracks[seq.id].times.append(now)
        self.step_ends.append(now)
        if self.watch is not None:
            self.watch(self.id, step, 1, work.since, now)  # the last part of a suspended step
        return first, self.tell([StepsDone(step.id, 1, work.seconds)], now)

    def token_times_so_far(self, seq: Seq, now: float) -> array[float]:
        return self.token_times(seq)

    def _tell_nearly_computed(self, now: float) -> None:
        work = self._work
        if work is not None and work.near_at is not None and now >= work.near_at - ROUNDING:
            self.ending += [seq for seq in work.ending if seq.state is SeqState.RUNNING]  # the others were cancelled
            work.ending = []

    def _go(self, work: Work, now: float) -> None:
        work.since = now
        self._work = work

    def _stop(self, now: float) -> None:
        work = self._work
        if work is not None:
            used = min(work.seconds, work.used + now - work.since)
            work.until = self.boundaries.next_boundary(work.step, work.seconds, used)
