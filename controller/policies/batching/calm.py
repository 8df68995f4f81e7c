"""Concord's CALM: the batch with the most goodput per second of generation, of similar input lengths.

"Concord: SLO-Aware Optimization and Stateful Orchestration for LLM Systems", sec. 4.2, eq. 4.1 and Alg. 4.1. The
priority is goodput / generation time, summed over the calls of a program's current stage (not the pseudo-code's
undivided goodput over bandwidth, which prefers late deadlines). Of the sequences within `cutoff` of the B-th highest
priority, sorted by input length, the window of B with the largest sum of priorities runs. A sequence that can no longer
meet its targets even alone (App. B's filter, which Alg. 4.1 lacks) only gets slots that no other needs, cheapest first,
and only while no sequence that can still meet them needs more than `late_below` of a slot: a late prompt costs every
sequence of its step more than a slot. (The paper drops requests after `waiting_time`.) After its last moment a sequence
is no longer weighed. Ties at equal length go to the least slack. Each frame that a sequence waits adds `starvation` to
its goodput. A running sequence outside the best batch keeps its slot unless the challenger passes cost-aware
preemption.

The batch is chosen once per frame of `frame_steps` engine steps; within a frame, free slots are filled by priority.
Lengths, goodput and deadlines come from the sequence's Estimate, whose length bound is read again each frame. Without
an Estimate the length is `max_tokens` and the goodput is the remaining tokens times `value`. Seconds per token are
those of the last frames' steps; whether targets are lost is judged at the fastest recent pace. Deviations: whole slots,
chosen again every frame; a prompt token is charged for all sequences that it delays, since long prompts would look
cheap otherwise; a sequence that loses its slot keeps its KV (which needs an engine with more `max_num_seqs` than
`slots`) and is evicted and computed again only when blocks run out, least priority first.

`rectangles` selects the other reading, that of the prose and Fig. 4.6. A sequence needs only a share of a slot: its
likely generation time over the time it has (for a paced one, seconds per token over its TBT). The sequences of highest
priority whose shares fit into `commit` (0.1) of all slots are committed and run first, least slack first. Then come, by
priority and without a window, those likely to meet their targets, and last those that meet them only if they are short.
There is no preemption guard in this reading: each frame has an order of its own.

`by_chance` weighs goodput by the chance to earn it (ours, not the paper's): the middle of both bounds and how far apart
they are, for an answer and for its program's later stages, say how likely the end is in time. Priority is then chance x
goodput / likely work, and there are no groups of likely and unlikely ones, since the chance says it by degrees: one
that needs more than a slot is committed as others are, while there is room for all that it needs. Work on a program
that will hardly end in time goes to others early; it is late, as before, by its lowest bound alone.

`slots` 64: sequences per step (B). `cutoff` 0.95 (the paper's example); `cutoffs`: values among which it is adapted
(empty: fixed; see calm/cutoff.py; not while nothing waits). `frame_steps` 50 (about 300 ms). `starvation` 0.5 tokens.
`late_below` 0.5 (0: late ones run alone). `fair_weight` 0: f of sec. 4.3, by what each tenant was served of late
(calm/shares.py), or by time waited while one alone asks. `token_s`,
`prefill_s`: seconds per token and per prompt token before anything is measured. Cost: O(n log n) per frame, below 5
ms for 5,000.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import ClassVar

import numpy as np

from controller.core.errors import ConfigError
from controller.core.steps import Aborted, Added, EngineEvent, Seq, SeqState, Step, StepRan
from controller.policies.batching.base import BATCHINGS, EngineView, Grant
from controller.policies.batching.filling import grant
from controller.policies.calm.choice import earned, select, with_fairness
from controller.policies.calm.columns import LEAST_S, Column, Columns, Pace, Standings
from controller.policies.calm.cutoff import AdaptiveCutoff
from controller.policies.calm.shares import TenantShares
from controller.policies.preemption.base import PreemptionCosts, SequenceStanding
from controller.policies.preemption.cost_aware import Config as PreemptionConfig
from controller.policies.preemption.cost_aware import CostAwarePreemption

SMOOTHING = 0.3  # weight of the last frame in the seconds per token
FORGETTING = 1.05  # growth per frame of the fastest recent seconds per token


@dataclass(frozen=True, slots=True)
class CalmConfig:
    slots: int = 64
    cutoff: float = 0.95
    cutoffs: Sequence[float] = ()
    frame_steps: int = 50
    starvation: float = 0.5
    fair_weight: float = 0.0
    rectangles: bool = False
    commit: float = 0.1
    late_below: float = 0.5
    by_chance: bool = False
    token_s: float = 0.02
    prefill_s: float = 1e-4
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)

    def __post_init__(self) -> None:
        for name, values in (("cutoff", (self.cutoff,)), ("cutoffs", self.cutoffs)):
            if not all(0 < value <= 1 for value in values):
                raise ConfigError(f"{name} must lie in (0, 1]", field=name)
        for name in ("slots", "frame_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        for name in ("token_s", "prefill_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive seconds", field=name)
        if self.starvation < 0:
            raise ConfigError("starvation must not be negative", field="starvation")
        for name in ("fair_weight", "commit", "late_below"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie in [0, 1]", field=name)


@BATCHINGS.register("calm")
class Calm:
    name: ClassVar[str] = "calm"
    selects: ClassVar[bool] = True
    reorders: ClassVar[bool] = True
    Config = CalmConfig

    def __init__(self, config: CalmConfig | None = None) -> None:
        self.config = config or CalmConfig()
        self.preemption = CostAwarePreemption(self.config.preemption)
        self._cutoff = AdaptiveCutoff(self.config.cutoffs or (self.config.cutoff,))
        self._columns = Columns()
        self._shares = TenantShares()
        self._ran: dict[Seq, None] = {}  # ran in the last step
        self._begun: dict[Seq, None] = {}  # in an earlier step, but not in the last one
        self._steps = 0
        self._token_s: float | None = None
        self._fast_s = math.inf
        self._frame_s = 0.0  # of this frame's steps with decodes
        self._frame_steps = 0
        self._contested = False  # something waited for a slot in this frame
        self._stays = 1
        self._dead: set[int] = set()  # rows of sequences that could not meet their targets when last weighed
        self._changes = 0  # sequences that joined, left or began to run
        self._filled: tuple[tuple[int, int, int], list[Seq]] = ((-1, 0, 0), [])  # who fills the batch, since when

    @property
    def token_s(self) -> float:
        return self.config.token_s if self._token_s is None else self._token_s

    @property
    def frame(self) -> int:
        return self._steps // self.config.frame_steps

    @property
    def cutoff(self) -> float:
        return self._cutoff.value

    def weigh_by(self, costs: PreemptionCosts) -> None:
        self.preemption.costs = costs

    # ---- the choice -----------------------------------------------------------------------------------------------

    def standings(self, seqs: Sequence[Seq], now: float) -> Standings:
        """In the order of `seqs`, which are all sequences of the engine."""
        self._columns.synchronise(seqs, self.frame)
        self._columns.refresh(seqs)
        found, rows = self._weigh(now), [self._columns.rows[seq] for seq in seqs]
        return Standings(*(column[rows] for column in found))

    def _weigh(self, now: float) -> Standings:
        config, columns = self.config, self._columns
        crowd = len(self._ran) or min(len(columns.rows), config.slots)
        pace = Pace(self.token_s, config.prefill_s, crowd, min(self._fast_s, self.token_s))
        found = columns.weigh(now, self.frame, pace, config.starvation, config.by_chance)
        self._dead = set(np.flatnonzero(columns.alive & (found.slack < 0)).tolist())
        if not config.fair_weight:
            return found
        blended = with_fairness(found.priority, self._fair(), config.fair_weight)
        return found._replace(priority=np.where(columns.alive, blended, -1.0))

    def _fair(self) -> Column:
        """In [0, 1] by row, larger for those served less."""
        columns = self._columns
        by_tenant = self._shares.fair(seq.tenant for seq in columns.rows)
        if by_tenant is None:
            waited: Column = np.maximum(0.0, self.frame - columns.since)
            return waited / max(1.0, float(waited.max(initial=0.0)))
        fair = np.zeros(len(columns.alive))
        fair[list(columns.rows.values())] = [by_tenant[seq.tenant] for seq in columns.rows]
        return fair

    def _served(self, step: Step, repeats: int) -> None:
        """Slot-seconds by tenant: a token takes its own slot, a prompt token delays all that run."""
        crowd = max(1, len(step.decodes))
        for seq in step.decodes:
            self._shares.use(seq.tenant, repeats * self.token_s)
        for chunk in step.chunks:
            self._shares.use(chunk.seq.tenant, chunk.length * crowd * self.config.prefill_s)

    def choose(self, seqs: Sequence[Seq], now: float) -> list[Seq]:
        """The next frame's batch, chosen from all sequences, best first."""
        columns, slots = self._columns, self.config.slots
        columns.synchronise(seqs, self.frame)
        columns.refresh(seq for seq in (*self._ran, *self._begun) if seq in columns.rows)
        found = self._weigh(now)
        feasible = np.flatnonzero(columns.alive & (found.slack >= 0))
        if self.config.rectangles:
            chosen = self._packed(feasible, found, slots)
        else:
            best = select(found.priority[feasible], columns.prompt[feasible], found.slack[feasible], slots, self.cutoff)
            chosen = self._keeping(self._sorted(feasible[best], found), found)
        batch = self._seqs(chosen) + self._late(found, slots - len(chosen))
        self._dead.difference_update(columns.give_up(found, now))
        return batch

    def _seqs(self, rows: Sequence[int]) -> list[Seq]:
        return [seq for row in rows if (seq := self._columns.seqs[row]) is not None]

    def _packed(self, rows: Column, found: Standings, slots: int) -> list[int]:
        """The committed ones by slack, then by priority those likely to meet their targets, then those that may."""
        if len(rows) <= slots:
            return self._sorted(rows, found)
        rows = rows[np.lexsort((rows, found.slack[rows], -found.priority[rows]))]
        bandwidth = found.bandwidth[rows]
        room = self.config.commit * self.config.slots
        likely = (bandwidth <= 1.0) | self.config.by_chance
        able = likely & (bandwidth <= max(1.0, room))  # what needs more than all room leaves the room to others
        promised = able & (np.cumsum(np.where(able, bandwidth, 0.0)) <= room)
        first = rows[promised]
        groups = (first[np.argsort(found.slack[first], kind="stable")], rows[likely & ~promised], rows[~likely])
        packed: list[int] = np.concatenate(groups)[:slots].tolist()
        return packed

    def _sorted(self, rows: Column, found: Standings) -> list[int]:
        order = np.lexsort((rows, found.slack[rows], -found.priority[rows]))
        ordered: list[int] = rows[order].tolist()
        return ordered

    def _late(self, found: Standings, most: int, besides: Collection[Seq] = ()) -> list[Seq]:
        """Sequences that cannot meet their targets, cheapest first, as long as they delay none that can."""
        columns = self._columns
        able = columns.alive & (found.slack >= 0)
        if most <= 0 or float(found.bandwidth[able].max(initial=0.0)) > self.config.late_below:
            return []
        rows = np.flatnonzero(columns.alive & (found.slack < 0)).tolist()
        costs = [*zip(self._seqs(rows), found.generation_s[rows].tolist(), strict=True), *columns.hopeless.items()]
        wanted = ((cost, seq.arrival, seq.id, seq) for seq, cost in costs if seq not in besides)
        return [each[3] for each in nsmallest(most, wanted)]

    def _keeping(self, chosen: list[int], found: Standings) -> list[int]:
        """Running sequences lose their slots, weakest first, only to challengers whose gain exceeds the cost."""
        columns = self._columns
        wanted = set(chosen)
        ran = [columns.rows[seq] for seq in self._ran if seq in columns.rows]
        running = set(ran)
        losing = self._sorted(np.array([r for r in ran if r not in wanted and found.slack[r] >= 0], np.intp), found)
        fresh = [row for row in chosen if row not in running]
        kept: list[int] = []
        refused: set[int] = set()
        speed = len(self._ran) / self.token_s
        for weakest, challenger in zip(reversed(losing), fresh, strict=False):
            holder, rival = self._standing(weakest, found), self._standing(challenger, found)
            if not self.preemption.weigh(holder, rival, speed).preempt:
                refused.add(challenger)
                kept.append(weakest)
        return [row for row in chosen if row not in refused] + kept

    def _standing(self, row: int, found: Standings) -> SequenceStanding:
        return SequenceStanding(float(found.priority[row]), float(found.goodput[row]), int(self._columns.held[row]))

    # ---- the step -------------------------------------------------------------------------------------------------

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        running = list(engine.running)
        seqs = [*running, *engine.waiting()]
        self._columns.synchronise(seqs, self.frame)
        grants = self._granted(engine, self._batch(seqs, now), running)
        left = self.config.frame_steps - self._steps % self.config.frame_steps
        self._stays = left if all(grant.seq.decoding for grant in grants) else 1
        return grants

    def _batch(self, seqs: Sequence[Seq], now: float) -> Sequence[Seq]:
        """A new choice at the start of a frame.

        Within a frame, running sequences go on and free slots are filled by priority.
        """
        slots, changes = self.config.slots, (self._changes, len(seqs), self.frame)
        if self._steps % self.config.frame_steps == 0:
            return self.choose(seqs, now)
        batch = [seq for seq in self._ran if self._columns.knows(seq)][:slots]
        if len(batch) == slots:
            return batch
        if self._filled[0] != changes:
            self._filled = (changes, self._filling(batch, now))
        return batch + [seq for seq in self._filled[1] if seq not in self._ran][: slots - len(batch)]

    def _filling(self, batch: Sequence[Seq], now: float) -> list[Seq]:
        """Sequences for the slots that the batch leaves free."""
        columns, room = self._columns, self.config.slots - len(batch)
        found = self._weigh(now)
        free = columns.alive & (found.slack >= 0)
        free[[columns.rows[seq] for seq in batch if seq in columns.rows]] = False
        rows = np.flatnonzero(free)
        if self.config.rectangles:
            chosen = self._packed(rows, found, room)
        elif len(rows) > room:
            least = np.partition(found.priority[rows], len(rows) - room)[len(rows) - room]
            chosen = self._sorted(rows[found.priority[rows] >= least], found)[:room]
        else:
            chosen = self._sorted(rows, found)
        return self._seqs(chosen) + self._late(found, room - len(chosen), self._ran)

    def _granted(self, engine: EngineView, batch: Sequence[Seq], running: Sequence[Seq]) -> list[Grant]:
        """Decodes, then started prefills, then queued ones while there is room.

        Room is a free seat, or that of a sequence that cannot meet its targets any more, which `spare` evicts. If there
        is none, running sequences go on.
        """
        admitted = set(running)
        seated = [seq for seq in batch if seq in admitted]
        queued = [seq for seq in batch if seq not in admitted]
        free = engine.max_num_seqs - len(running)
        if len(queued) > free:  # else it does not matter how many could be evicted: there may be thousands
            lost = sum(self._is_late(seq) for seq in admitted.difference(seated))
            queued = queued[: max(0, free + lost)]
        missing = min(self.config.slots, len(batch)) - len(seated) - len(queued)
        if missing > 0:  # the sequence that would have been replaced goes on
            left_out = admitted.difference(seated)
            seated += sorted(left_out, key=lambda seq: (seq not in self._ran, seq.arrival, seq.id))[:missing]
        return grant(engine, seated, queued)

    def _is_late(self, seq: Seq) -> bool:
        return seq in self._columns.hopeless or self._columns.rows.get(seq) in self._dead

    def stays(self) -> int:
        return self._stays

    def spare(self, running: Sequence[Seq], wanted: Collection[Seq]) -> Seq | None:
        """Of the paused ones, first those that cannot meet their targets any more (as last weighed), then the one with
        the least goodput for its work.
        """
        columns = self._columns
        paused = [seq for seq in running if seq not in wanted and columns.knows(seq)]
        if not paused:
            return None
        for seq in paused:
            if seq in columns.hopeless:
                return seq
        rows = [columns.rows[seq] for seq in paused]
        worth = columns.goodput[rows] / np.maximum(1.0, columns.left[rows] + columns.prefill[rows])
        return paused[int(np.lexsort((worth, [row not in self._dead for row in rows]))[0])]

    # ---- what is learned ------------------------------------------------------------------------------------------

    def observe(self, event: EngineEvent, now: float) -> None:
        if isinstance(event, Added) and event.seq.state is not SeqState.FINISHED:
            self._columns.add(event.seq, self.frame)
            self._changes += 1
        elif isinstance(event, Aborted):
            self._forget(event.seq)
        elif isinstance(event, StepRan):
            self._observe_step(event, now)

    def _forget(self, seq: Seq) -> None:
        self._changes += 1
        self._dead.discard(self._columns.rows.get(seq, -1))  # its row may be given to another sequence
        self._columns.drop(seq)
        self._ran.pop(seq, None)
        self._begun.pop(seq, None)

    def _observe_step(self, event: StepRan, now: float) -> None:
        step, columns = event.step, self._columns
        seqs = [*step.decodes, *(chunk.seq for chunk in step.chunks)]
        before, self._ran = self._ran, dict.fromkeys(seq for seq in seqs if seq.finish is None)
        for seq in before:
            if seq not in self._ran and seq.finish is None:
                self._begun[seq] = None
                self._changes += 1
                if seq in columns.rows:
                    columns.refresh((seq,))
        frame = self.frame
        if self.config.fair_weight:
            self._served(step, event.repeats)
        self._steps += event.repeats
        self._contested |= len(columns.rows) > self.config.slots
        for seq in seqs:
            self._begun.pop(seq, None)
            if seq.finish is not None:
                self._cutoff.earned(earned(seq, now))
                self._forget(seq)
        for seq in self._ran:
            if not columns.knows(seq):
                columns.add(seq, frame)
        if self._ran:
            columns.ran(self._ran, self.frame)
        if step.decodes:
            self._frame_s += event.seconds
            self._frame_steps += event.repeats
        if self.frame != frame:
            self._shares.fade(self.frame - frame)
            self._cutoff.tick(self.frame, self._contested)
            self._contested = False
            if self._frame_steps:
                found = max(
                    LEAST_S, self._frame_s / self._frame_steps
                )  # some drivers do not report how long steps take
                self._token_s = found if self._token_s is None else self._token_s + SMOOTHING * (found - self._token_s)
                self._fast_s = min(found, FORGETTING * self._fast_s)
            self._frame_s, self._frame_steps = 0.0, 0
