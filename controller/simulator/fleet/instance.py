"""One simulated engine: the real scheduler, a latency model in place of a device, and leaps over equal steps."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from controller.core.steps import (
    EngineAction,
    EngineEvent,
    Landed,
    Release,
    Reserve,
    Seq,
    SeqState,
    Start,
    Step,
    StepsDone,
)
from controller.core.types import Load
from controller.policies.batching import Pausing
from controller.predict.latency import LatencyModel
from controller.simulator.fleet.tokens import Track
from controller.simulator.machine_speed import SpeedClock
from controller.simulator.settings import InstanceSettings

MOST_STEPS = 256  # the next arrival ends a leap anyway, so planning further ahead would be wasted


WatchStep = Callable[[str, Step, int, float, float], None]  # instance, step, repeats, start, end


class SimulatedInstance:
    """`due`: when the running step, or the last step of the leap, ends. `version` changes with it."""

    def __init__(self, instance_id: str, settings: InstanceSettings, up_at: float, leaps: bool) -> None:
        self.id = instance_id
        self.spec = settings.spec(instance_id)
        self.engine = settings.build_engine()
        self.latency = LatencyModel(settings.latency)
        self.kv_bytes_per_token = settings.kv_bytes_per_token
        self._by_longest = settings.decode_by == "longest"
        self.up_at = up_at
        self.up = True
        self.down_at: float | None = None
        self.due: float | None = None
        self.version = 0
        self.busy_s = 0.0
        self.watch: WatchStep | None = None
        self.speed: SpeedClock | None = None  # None: steps take the time of the latency model
        self.slowed_s: Callable[[], float] = lambda: 0.0  # how much longer a step takes that begins now
        self.ending: list[Seq] = []  # sequences with `keep_kv` whose last prefill step has begun
        self.tracks: dict[str, Track] = {}
        self.step_ends: array[float] = array("d")
        self._leaps = leaps
        self._pausing = isinstance(self.engine.batching, Pausing)
        self._steady = self._pausing or bool(getattr(self.engine.batching, "steady", False))
        self._single = not self._steady  # steps are run one by one
        self._landing: set[Seq] = set()  # arrived with their KV and have not been in a step yet
        self._flowing: set[Seq] = set()  # got a token in the last step; needed for policies that may leave some out
        self._step: Step | None = None
        self._started = 0.0
        self._ends: list[float] = []
        self._planned: tuple[tuple[Seq, ...], list[float]] = (
            (),
            [],
        )  # all steps of the last leap, in case it goes on as planned

    # ---- what the simulation does ---------------------------------------------------------------------------------

    def tell(self, events: Sequence[EngineEvent], now: float) -> list[EngineAction]:
        """Give events to the engine. A leap is cut after the step that runs now, so that the engine can react."""
        if len(self._ends) > 1:
            if any(isinstance(event, Reserve | Landed | Release) for event in events):
                self._settle(now)
            self._cut(now)
        for event in events:
            if isinstance(event, Landed):
                self.tracks[event.seq.id] = Track(counted=event.seq.output_tokens)
                if self._steady and not self._pausing:
                    self._landing.add(event.seq)
        actions = self.engine.handle(events, now).actions
        if actions and type(actions[-1]) is Start:
            self._begin(actions.pop().step, now)  # type: ignore[union-attr]
        return actions

    def complete(self, now: float) -> tuple[list[Seq], list[EngineAction]]:
        """The step or leap that was due has ended: sequences with their first token, and the engine's actions."""
        step, ends = self._step, self._ends
        if step is None:
            raise RuntimeError(f"{self.id} has no step to complete")
        self._step, self._ends, self.due = None, [], None
        self.version += 1  # the same end can be due twice, if events changed nothing in the engine
        self.busy_s += now - self._started
        started = [chunk.seq for chunk in step.chunks if chunk.last]
        first = [seq for seq in started if seq.output_tokens == 0]
        for seq in started:
            self.tracks.setdefault(seq.id, Track()).begin(len(self.step_ends), seq.output_tokens)
        self._track(step, started, now)
        self.step_ends.extend(ends)
        if self.watch is not None:
            self.watch(self.id, step, len(ends), self._started, now)
        return first, self.tell([StepsDone(step.id, len(ends), now - self._started)], now)

    def _track(self, step: Step, started: Sequence[Seq], at: float) -> None:
        """Record to whom the tokens of the next `step_ends` belong; for steps run one by one, tokens at `at`.

        A sequence that was aborted in the step gets none.
        """
        if self._single:
            tracks = self.tracks
            for seq in (*started, *step.decodes):
                if (track := tracks.get(seq.id)) is not None:
                    track.times.append(at)
        elif self._pausing:
            flowing = set(step.decodes)
            for seq in flowing - self._flowing:
                if seq.state is not SeqState.FINISHED:
                    self.tracks[seq.id].begin(len(self.step_ends), seq.output_tokens)
            flowing.update(started)
            self._flowing = flowing
        elif self._landing:
            for seq in self._landing.intersection(step.decodes):
                if seq.state is not SeqState.FINISHED:
                    self.tracks[seq.id].begin(len(self.step_ends), seq.output_tokens)
            self._landing.difference_update(step.decodes)

    def token_times(self, seq: Seq) -> array[float]:
        """Token times of a sequence that ended; forgets them."""
        track = self.tracks.pop(seq.id, None)
        return track.collect(self.step_ends, seq.output_tokens) if track is not None else array("d")

    def token_times_so_far(self, seq: Seq, now: float) -> array[float]:
        """Token times of a running sequence that is cut, including those of the running leap."""
        track = self.tracks.pop(seq.id, None)
        if track is None:
            return array("d")
        decodes = self._step.decodes if self._step is not None else ()
        extra = bisect_right(self._ends, now) if len(self._ends) > 1 and seq in decodes else 0
        return track.collect(self.step_ends + array("d", self._ends[:extra]), seq.output_tokens + extra)

    @property
    def stepping(self) -> bool:
        return self._step is not None

    # ---- what is seen from outside --------------------------------------------------------------------------------

    def produced(self, now: float) -> Iterator[tuple[str, int]]:
        """(id, tokens so far) of every sequence that has its first token."""
        extra = bisect_right(self._ends, now) if len(self._ends) > 1 else 0
        leaping = set(self._step.decodes) if extra and self._pausing and self._step is not None else None
        for seq in self.engine.running:
            if seq.output_tokens:
                yield seq.id, seq.output_tokens + (extra if leaping is None or seq in leaping else 0)

    def load(self, now: float) -> Load:
        engine = self.engine
        totals = engine.totals
        return Load(
            observed_at=now,
            running=len(engine.running) + engine.arrived_count,
            waiting=engine.waiting_count,
            kv_usage=self._kv_usage(now),
            kv_capacity_tokens=engine.config.kv_capacity_tokens,
            max_num_seqs=engine.config.max_num_seqs,
            prompt_tokens_total=totals.prompt,
            generation_tokens_total=totals.generated,
            cached_tokens_total=totals.prefix_hits,
        )

    def _kv_usage(self, now: float) -> float:
        """As if steps were run one by one: during a leap, decodes also hold the blocks of steps that have ended."""
        blocks = self.engine.blocks
        done = bisect_right(self._ends, now) if len(self._ends) > 1 else 0
        if not done or self._step is None:
            return blocks.usage
        done = min(done, len(self._ends) - 1)
        more = sum(blocks.blocks_for(seq.computed + done + 1) - len(seq.blocks) for seq in self._step.decodes)
        return blocks.usage + more / blocks.total

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _begin(self, step: Step, now: float) -> None:
        self._step, self._started = step, now
        if step.chunks:
            tokens = squares = 0
            for chunk in step.chunks:
                tokens += chunk.length
                squares += chunk.length * (chunk.length + 2 * chunk.start)
                if chunk.last and chunk.seq.keep_kv:
                    self.ending.append(chunk.seq)
            seconds = self.latency.step(tokens, squares, len(step.decodes), self._context(step))
            self._ends = [self._after(now, seconds)]
        else:
            self._ends = self._decode_ends(step, now)
        self._plan()

    def _decode_ends(self, step: Step, now: float) -> list[float]:
        """The ends of the steps, added in the same order as one step after the other, so that results are
        bit-identical.
        """
        if not self._leaps:
            return [self._after(now, self.latency.decode(len(step.decodes), self._context(step)))]
        repeats = min(self.engine.repeats(), MOST_STEPS)
        decodes, ends = self._planned
        done = bisect_right(ends, now)
        if decodes == step.decodes and 0 < done < len(ends) and ends[done - 1] == now:
            return ends[done : done + repeats]  # an arrival cut the leap and found no room, so nothing has changed
        ends = self._extrapolated(step, now, repeats)
        self._planned = (step.decodes, list(ends))
        return ends

    def _extrapolated(self, step: Step, now: float, repeats: int) -> list[float]:
        batch, context = len(step.decodes), self._context(step)
        grows = 1 if self._by_longest else batch
        k = self.latency.coefficients
        a, b, c = k.decode_a, k.decode_b, k.decode_c * batch
        ends, at = [], now
        after = self.speed.after if self.speed is not None else None
        for _ in range(repeats):
            at = at + (a + b * context + c) if after is None else after(at, a + b * context + c)
            ends.append(at)
            context += grows
        return ends

    def _context(self, step: Step) -> int:
        """Tokens that the time of its decodes depends on."""
        return max((seq.tokens for seq in step.decodes), default=0) if self._by_longest else step.context_sum

    def _after(self, now: float, seconds: float) -> float:
        seconds += self.slowed_s()
        return now + seconds if self.speed is None else self.speed.after(now, seconds)

    def _settle(self, now: float) -> None:
        """Tell the engine of the ended steps of a leap, before blocks are counted."""
        done = bisect_right(self._ends, now)
        if not done or done == len(self._ends) or self._step is None:
            return
        step, at = self._step, self._ends[done - 1]
        self._track(step, (), at)
        if self.watch is not None:
            self.watch(self.id, step, done, self._started, at)
        self.step_ends.extend(self._ends[:done])
        self.busy_s += at - self._started
        ran = StepsDone(step.id, done, at - self._started)
        for action in self.engine.handle([ran], at).actions:
            if not isinstance(action, Start):
                raise RuntimeError(f"a leap of {self.id} ended a sequence before its end")
            self._begin(action.step, at)

    def _cut(self, now: float) -> None:
        keep = bisect_right(self._ends, now) + 1
        if keep < len(self._ends):
            del self._ends[keep:]
            self._plan()

    def _plan(self) -> None:
        self.due = self._ends[-1]
        self.version += 1
