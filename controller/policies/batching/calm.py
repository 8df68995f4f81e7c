"""Concord's CALM: the batch with the most goodput per second of generation, of similar input lengths.

"Concord: SLO-Aware Optimization and Stateful Orchestration for LLM Systems", sec. 4.2, eq. 4.1 and Alg. 4.1. Priority
is goodput / generation time (not the pseudo-code's undivided goodput over bandwidth, which prefers late deadlines). Of
the sequences within `cutoff` of the B-th highest priority, sorted by input length, the window of B with the largest sum
of priorities runs. What can no longer meet its promise even alone (App. B's filter, which Alg. 4.1 lacks) runs only in
slots that nobody else wants, cheapest first. Ties at equal length go to the least slack. Each frame that a sequence
waits adds `starvation` to its goodput. A running sequence outside the best batch keeps its slot unless the challenger
passes cost-aware preemption.

Scheduling happens once a frame of `frame_steps` engine steps; in between, slots that become free are filled in order of
priority. Goodput of a sequence is its remaining output tokens times its value. Its promise is the last token's, due +
(n - 1) x TPOT. The length is `max_tokens` (the learned bound is another part), seconds a token the running mean of
decode steps. Deviations: whole slots, chosen again every frame; a sequence that loses its slot stays where it is with
its KV (an engine with more `max_num_seqs` than `slots` is needed for that, else nobody can take its place), evicted
only when blocks run out; the cutoff is fixed, not adapted.

`slots` 64: sequences a step (B); `cutoff` 0.95 (the paper's example); `frame_steps` 50 (about 300 ms); `starvation` 0.5
tokens; `token_s`, `prefill_s`: seconds a token before anything was measured. Cost: O(n log n) a step, 5 ms for 5,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from controller.core.errors import ConfigError
from controller.core.steps import Aborted, Added, EngineEvent, Seq, SeqState, StepRan
from controller.policies.batching.base import BATCHINGS, EngineView, Grant
from controller.policies.preemption.cost_aware import Config as PreemptionConfig
from controller.policies.preemption.cost_aware import CostAwarePreemption, Standing

Column = np.ndarray
LEAST_S = 1e-9  # of generation: a sequence about to end divides by its last step, not by zero


@dataclass(frozen=True, slots=True)
class CalmConfig:
    slots: int = 64
    cutoff: float = 0.95
    frame_steps: int = 50
    starvation: float = 0.5
    token_s: float = 0.02
    prefill_s: float = 1e-4
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)

    def __post_init__(self) -> None:
        if not 0 < self.cutoff <= 1:
            raise ConfigError("cutoff must lie in (0, 1]", field="cutoff")
        for name in ("slots", "frame_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        for name in ("token_s", "prefill_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive seconds", field=name)
        if self.starvation < 0:
            raise ConfigError("starvation must not be negative", field="starvation")


def margin_goodput(goodput: Column, generation_s: Column, waited: Column | float = 0.0, bonus: float = 0.0) -> Column:
    """Eq. 4.1 with the starvation term: goodput per second, higher goes first."""
    found: Column = (goodput + bonus * waited) / np.maximum(generation_s, LEAST_S)
    return found


def with_fairness(priority: Column, fair: Column, weight: float) -> Column:
    """Sec. 4.3: (1 - f) x priority + f x fair, priority scaled to [0, 1] first; `fair` is larger for who got less."""
    largest = float(priority.max(initial=0.0)) or 1.0
    blended: Column = (1.0 - weight) * priority / largest + weight * fair
    return blended


def select(priority: Column, inputs: Column, slack: Column, slots: int, cutoff: float) -> Column:
    """Alg. 4.1 lines 11 to 17: indices of the batch. Fewer than `slots`: all of them."""
    count = len(priority)
    if count <= slots:
        return np.arange(count)
    threshold = cutoff * np.partition(priority, count - slots)[count - slots]
    candidates = np.flatnonzero(priority >= threshold)
    candidates = candidates[np.lexsort((slack[candidates], inputs[candidates]))]
    sums = np.concatenate(([0.0], np.cumsum(priority[candidates])))
    windows = sums[slots:] - sums[:-slots]
    best = float(windows.max())
    first = int(np.argmax(windows >= best - 1e-9 * max(1.0, abs(best))))  # equal sums: the shortest inputs
    return candidates[first : first + slots]


class Standings(NamedTuple):
    """Columns over sequences, in the order given."""

    priority: Column
    goodput: Column
    generation_s: Column
    slack: Column


@BATCHINGS.register("calm")
class Calm:
    name: ClassVar[str] = "calm"
    reorders: ClassVar[bool] = True
    Config = CalmConfig

    def __init__(self, config: CalmConfig | None = None) -> None:
        self.config = config or CalmConfig()
        self.preemption = CostAwarePreemption(self.config.preemption)
        self._ran: set[str] = set()  # in the last step
        self._steps = 0
        self._decode_s = 0.0
        self._decode_steps = 0
        self._since: dict[str, int] = {}  # frame in which a sequence last ran

    @property
    def token_s(self) -> float:
        return self._decode_s / self._decode_steps if self._decode_steps else self.config.token_s

    @property
    def frame(self) -> int:
        return self._steps // self.config.frame_steps

    def standings(self, seqs: Sequence[Seq], now: float) -> Standings:
        count, config = len(seqs), self.config
        left = np.fromiter((s.max_tokens - s.output_tokens for s in seqs), float, count)
        prefill = np.fromiter((s.remaining if not s.decoding else 0 for s in seqs), float, count)
        value = np.fromiter((s.value for s in seqs), float, count)
        promised = np.fromiter((_promised(s) for s in seqs), float, count)
        waited = np.fromiter((self.frame - self._since.get(s.id, self.frame) for s in seqs), float, count)
        generation = left * self.token_s + prefill * config.prefill_s
        goodput = left * value
        priority = margin_goodput(goodput, generation, waited, config.starvation)
        return Standings(priority, goodput, generation, promised - now - generation)

    def choose(self, seqs: Sequence[Seq], now: float) -> list[Seq]:
        """The next frame's batch."""
        found = self.standings(seqs, now)
        feasible = np.flatnonzero(found.slack >= 0)
        inputs = np.fromiter((s.prompt_tokens for s in seqs), float, len(seqs))
        slots, cutoff = self.config.slots, self.config.cutoff
        best = select(found.priority[feasible], inputs[feasible], found.slack[feasible], slots, cutoff)
        chosen = feasible[best].tolist()
        if len(chosen) < slots:
            late = np.flatnonzero(found.slack < 0)
            chosen += late[np.argsort(found.generation_s[late], kind="stable")][: slots - len(chosen)].tolist()
        return [seqs[index] for index in self._keeping(seqs, chosen, found)]

    def _keeping(self, seqs: Sequence[Seq], chosen: list[int], found: Standings) -> list[int]:
        """Running sequences lose their slots, weakest first, only to challengers that are worth it."""
        wanted = set(chosen)
        losing = [i for i, seq in enumerate(seqs) if seq.id in self._ran and i not in wanted]
        fresh = [i for i in chosen if seqs[i].id not in self._ran]
        spare = self.config.slots - len(chosen)
        losing.sort(key=lambda i: (-found.priority[i], found.slack[i], seqs[i].id))
        kept, losing = losing[:spare], losing[spare:]
        losing.reverse()
        fresh.sort(key=lambda i: (-found.priority[i], found.slack[i], seqs[i].id))
        refused: set[int] = set()
        speed = len(self._ran) / self.token_s
        for weakest, challenger in zip(losing, fresh, strict=False):
            running = _standing(seqs[weakest], found, weakest)
            if (
                found.slack[weakest] >= 0
                and not self.preemption.weigh(running, _standing(seqs[challenger], found, challenger), speed).preempt
            ):
                refused.add(challenger)
                kept.append(weakest)
        return [i for i in chosen if i not in refused] + kept

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        running = list(engine.running)
        room = engine.max_num_seqs - len(running)
        waiting = list(engine.waiting()) if room > 0 else []
        admitted = {seq.id for seq in running}
        grants: list[Grant] = []
        budget = engine.token_budget
        for seq in self._seated(self._batch([*running, *waiting], now), running, room, now):
            if budget <= 0:
                break
            tokens = min(seq.remaining if seq.id in admitted else engine.uncached(seq), budget)
            grants.append(Grant(seq, tokens))
            budget -= tokens
        return grants

    def _seated(self, batch: Sequence[Seq], running: Sequence[Seq], room: int, now: float) -> list[Seq]:
        """Decodes, prefills begun, then queued ones while there is room; free slots go to other running ones."""
        wanted, admitted = {seq.id for seq in batch}, {seq.id for seq in running}
        queued = [seq for seq in batch if seq.id not in admitted][:room]
        left_out = [seq for seq in running if seq.id not in wanted]
        seated = [seq for seq in batch if seq.id in admitted]
        missing = self.config.slots - len(seated) - len(queued)
        if missing > 0 and left_out:
            found = self.standings(left_out, now)
            seated += [left_out[i] for i in np.lexsort((found.slack, -found.priority)).tolist()[:missing]]
        return sorted(seated, key=lambda seq: not seq.decoding) + queued

    def _batch(self, seqs: Sequence[Seq], now: float) -> Sequence[Seq]:
        """A new choice at the start of a frame; within one, who ran goes on and free slots are filled by priority."""
        slots = self.config.slots
        if len(seqs) <= slots:
            return seqs
        if self._steps % self.config.frame_steps == 0:
            return self.choose(seqs, now)
        batch = [seq for seq in seqs if seq.id in self._ran]
        others = [seq for seq in seqs if seq.id not in self._ran]
        if len(batch) >= slots or not others:
            return batch[:slots]
        found = self.standings(others, now)
        order = np.lexsort((found.slack, -found.priority, found.slack < 0)).tolist()
        return batch + [others[index] for index in order[: slots - len(batch)]]

    def observe(self, event: EngineEvent, now: float) -> None:
        if isinstance(event, Added) and event.seq.state is not SeqState.FINISHED:
            self._since[event.seq.id] = self.frame
        elif isinstance(event, Aborted):
            self._since.pop(event.seq.id, None)
        elif isinstance(event, StepRan):
            self._observe_step(event)

    def _observe_step(self, event: StepRan) -> None:
        step = event.step
        seqs = [*step.decodes, *(chunk.seq for chunk in step.chunks)]
        self._ran = {seq.id for seq in seqs if seq.finish is None}
        self._steps += event.repeats
        for seq in seqs:
            if seq.finish is None:
                self._since[seq.id] = self.frame
            else:
                self._since.pop(seq.id, None)
        if step.decodes and not step.chunks:
            self._decode_s += event.seconds
            self._decode_steps += event.repeats


def _standing(seq: Seq, found: Standings, index: int) -> Standing:
    return Standing(float(found.priority[index]), float(found.goodput[index]), seq.computed)


def _promised(seq: Seq) -> float:
    """When the last token is due."""
    return seq.due + (seq.max_tokens - 1) * seq.tpot_s if seq.max_tokens > 1 else seq.due
