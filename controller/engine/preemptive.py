"""FlowPrefill's prefill scheduler: event-driven rounds, and preemption inside a running step.

"FlowPrefill: Decoupling Preemption from Prefill Scheduling Granularity", Alg. 2 with Alg. 1 for batches and eq. 3 for
the order. A round happens when a prompt arrives, when a batch is done and when a request is aborted, so about twice for
each request. It ranks waiting prompts and running and suspended tasks; the first one gets the device. A task that runs
there is signalled, stops at its next boundary (operator, layer or chunk), and only then the new one begins. A suspended
task later resumes where it stopped and computes the same bits.

Where we deviate from the printed algorithm: the running task is not a candidate for a batch (line 14 would execute it
twice), and it is cleared before the round that its end causes; remaining times are ranked, not total times, so that a
nearly finished task does not look hopeless; a batch is ranked by its head with the tokens of the whole batch.

What we add: prompts that arrive between a signal and its acknowledgement are ranked at once; a prompt that finds no KV
blocks or no slot waits while suspended tasks, which hold their blocks, run; blocks for the longest possible output are
reserved at admission, so nothing is ever recomputed. A batch is one step, whatever `max_num_batched_tokens` is, unless
`chunk_tokens` cuts it. Sequences may also decode here (the paper runs them beside the prefill on the same device; we
run one step at a time): a decode step of all of them runs between boundaries, at the last moment that attains every
TPOT, or at once while there are no prompts. A prompt whose prefix another engine sends (`ComingPrefix`) is a task of
its own, whose step suspends itself before a layer that is not here. Others run until it is, and a prefix that is lost
is computed.

The interface is EngineScheduler's. Cost: O(log n) a round for n waiting prompts, plus Alg. 1's scan for each batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from controller.core.steps import (
    Added,
    Discard,
    EngineAction,
    EngineEvent,
    EngineReply,
    FinishReason,
    LayersCame,
    PrefixEnded,
    Reject,
    Release,
    Resume,
    Resumed,
    Seq,
    SeqState,
    Start,
    Step,
    StepDone,
    StepsDone,
    Suspend,
    Suspended,
)
from controller.engine.assembly import assemble
from controller.engine.config import EngineConfig
from controller.engine.errors import ProtocolError
from controller.engine.scheduler import EngineScheduler
from controller.engine.seats import RankedQueue
from controller.engine.tasks import DecodeTurns, PreemptionConfig, PrefillTask, RoundTotals, holds
from controller.policies.batching.slo_aware_batching import SloAwareBatching


class PreemptivePrefill(EngineScheduler):
    """FlowPrefill's scheduler. `rounds` counts what sec. 6.4 of the paper measures."""

    overlaps_copies = True
    evicts = False

    def __init__(
        self,
        config: EngineConfig,
        batching: SloAwareBatching,
        preemption: PreemptionConfig | None = None,
        former: EngineScheduler | None = None,
    ) -> None:
        super().__init__(config, batching, former)
        self.preemption = preemption or PreemptionConfig()
        self.whole_prompts = self.preemption.chunk_tokens is None
        self.rounds = RoundTotals()
        self._rules = batching
        self._ranked = RankedQueue(batching.order)
        self._suspended: list[PrefillTask] = []
        self._task: PrefillTask | None = None  # on the device; None too while a decode step runs there
        self._next: PrefillTask | Seq | None = None  # what the last round chose
        self._round = False
        self._turns = DecodeTurns(self.preemption)

    # ---- events -------------------------------------------------------------------------------------------------

    def handle(self, events: Sequence[EngineEvent], now: float) -> EngineReply:
        actions: list[EngineAction] = []
        for event in events:
            self._apply(event, now, actions)
            self.batching.observe(event, now)
        self._seats.take_arrived(self._in_transit.arrived)
        if self._round or self._lost_room():
            self._choose(now)
        self._act(now, actions)
        return EngineReply(actions, self._wake_at(now))

    def _wake_at(self, now: float) -> float | None:
        """When the running prompts must be suspended for a decode step, if no event comes before."""
        task = self._task
        if task is None or task.signalled_at is not None or self.preemption.boundary == "none":
            return None
        return self._turns.due(self._decoding, now)

    def _apply(self, event: EngineEvent, now: float, actions: list[EngineAction]) -> None:
        match event:
            case StepDone() | StepsDone():
                task, self._task = self._task, None
                super()._apply(event, now, actions)
                if task is not None:
                    self._ran(task, now)
                else:
                    self._look_for_room()
            case Suspended():
                self._stopped(event, now, actions)
            case LayersCame(coming, layers):
                coming.layers = layers
                self._round = True
            case Added(seq):
                super()._apply(event, now, actions)
                if seq.state is SeqState.WAITING:
                    self._enqueue(seq, now)
            case Release():
                super()._apply(event, now, actions)
                self._look_for_room()
            case PrefixEnded(seq, tokens):
                super()._apply(event, now, actions)
                self._look_for_room()
                self._prefix_ended(seq, lost=not tokens, now=now, actions=actions)
            case Resumed():
                super()._apply(event, now, actions)
                self._round = True
            case _:
                super()._apply(event, now, actions)

    def _enqueue(self, seq: Seq, now: float) -> None:
        self._ranked.add(seq, self._rules.predict(self.uncached(seq)), now)
        self._round = True

    def _look_for_room(self) -> None:
        """Blocks were freed: a prompt that found none before may fit now."""
        self._round |= self._next is None and len(self._ranked) > 0

    def _reserve_for(self, seq: Seq, needed: bool, actions: list[EngineAction]) -> None:
        """As at admission, reserve blocks for its longest possible output, since nothing here is recomputed."""
        if seq.tokens < self.config.max_model_len and self._blocks_wanted(seq) > self.blocks.free:
            actions.append(Reject(seq, "no_room"))
            return
        super()._reserve_for(seq, needed, actions)
        if seq.state is SeqState.ARRIVING:
            self.blocks.extend(seq, self._longest(seq) - seq.computed)

    def _abort(self, seq: Seq, reason: FinishReason, actions: list[EngineAction]) -> None:
        if seq.state is SeqState.WAITING:
            self._ranked.remove(seq)
        self._round |= seq.state is not SeqState.FINISHED
        super()._abort(seq, reason, actions)

    # ---- the end of a part ----------------------------------------------------------------------------------------

    def _ran(self, task: PrefillTask, now: float) -> None:
        """A step of the task ended, possibly after a signal."""
        task.used_s += now - task.since
        task.step, task.step_s = None, 0.0
        self._answered(task, now)
        if task.unfinished:
            self._suspended.append(task)
            self._next = self._next or task
        else:
            self._round = True

    def _stopped(self, event: Suspended, now: float, actions: list[EngineAction]) -> None:
        step_id, seconds, layers = event
        task = self._task
        asked = task is not None and task.signalled_at is not None
        if task is None or task.step is None or task.step.id != step_id or not (asked or layers):
            raise ProtocolError(f"step {step_id} was not asked to stop")
        task.used_s += seconds - task.step_s
        task.step_s, task.layers = seconds, layers
        self._answered(task, now)
        self._task = self._step = None
        self._suspended.append(task)
        self.rounds.preempts += not layers
        self.rounds.layer_waits += layers > 0
        self._round |= layers > 0
        if task.has_lost:
            self._abandon(task, now, actions)
        self._after_steps()

    def _answered(self, task: PrefillTask, now: float) -> None:
        if task.signalled_at is not None:
            self.rounds.blocked(now - task.signalled_at)
            task.signalled_at = None

    # ---- prefixes that are copied while their prompts are computed ------------------------------------------------

    def _prefix_ended(self, prefix: Seq, *, lost: bool, now: float, actions: list[EngineAction]) -> None:
        """All its layers are here, or some never will be."""
        for seq in [*self._waiting, *self._running]:
            if seq.coming is None or seq.coming.seq is not prefix:
                continue
            self._round = True
            if not lost:
                seq.coming = None
            elif seq.state is SeqState.WAITING:
                self._ranked.remove(seq)
                self._forget_coming(seq)
                self._enqueue(seq, now)
            else:
                seq.coming.lost = True
                for task in [each for each in self._suspended if each.has_lost]:
                    self._abandon(task, now, actions)

    def _abandon(self, task: PrefillTask, now: float, actions: list[EngineAction]) -> None:
        """Drop what a suspended task has computed after a lost prefix. Its prompt is computed whole."""
        self._suspended.remove(task)
        self._next = None if self._next is task else self._next
        if task.step is not None:
            actions.append(Discard(task.step.id))
        for seq in task.unfinished:
            self._forget_coming(seq)
            self._seats.evict(seq)
            self._enqueue(seq, now)

    def _forget_coming(self, seq: Seq) -> None:
        seq.coming = seq.origin = None

    def _forget_prefixes(self) -> None:
        super()._forget_prefixes()
        for seq in [each for each in self._waiting if each.coming is not None]:
            self._forget_coming(seq)

    # ---- a round (Alg. 2) -----------------------------------------------------------------------------------------

    def _choose(self, now: float) -> None:
        self._round = False
        self.rounds.rounds += 1
        best: PrefillTask | Seq | None = None
        key = None
        for task in self._live_tasks():
            if task.waits:
                continue
            rank = self._ranked.key(task.unfinished[0], task.needed_s(now, task is self._task), now)
            if key is None or rank < key:
                best, key = task, rank
        self._ranked.advance(now)
        first = self._ranked.first
        if first is not None and (key is None or first[0] < key) and self._has_room(first[1]):
            best = first[1]
        self._next = best

    def _live_tasks(self) -> list[PrefillTask]:
        tasks = self._suspended if self._task is None else [*self._suspended, self._task]
        return [task for task in tasks if task.unfinished]

    def _has_room(self, seq: Seq) -> bool:
        wanted = self._blocks_wanted(seq) - (len(seq.coming.seq.blocks) if seq.coming is not None else 0)
        while wanted > self.blocks.free and not self._running and self.checkpoints.drop():
            continue  # with nothing running, nothing else will free blocks
        return len(self._running) < self.config.max_num_seqs and wanted <= self.blocks.free

    def _lost_room(self) -> bool:
        """Arriving KV took the blocks or the slot of the prompt chosen to run next."""
        return isinstance(self._next, Seq) and not self._has_room(self._next)

    def _longest(self, seq: Seq) -> int:
        """Most tokens whose KV it can ever hold. The KV of its last token is never computed."""
        left = max(1, seq.max_tokens - seq.output_tokens)
        return min(seq.tokens + left, self.config.max_model_len) - 1

    def _blocks_wanted(self, seq: Seq) -> int:
        return self.blocks.blocks_for(self._longest(seq))

    # ---- commands -------------------------------------------------------------------------------------------------

    def _act(self, now: float, actions: list[EngineAction]) -> None:
        if self._step is not None:
            self._signal_if_wanted(now, actions)
            return
        self._forget_dead(actions)
        if self._round:  # the blocks that they held may be enough for a prompt
            self._choose(now)
        if self._paused is not None:
            self._drop_all_if_asked(now, actions)
            return
        decoding = self._decoding
        if decoding and (self._next is None or self._turns.is_due(decoding, now)):
            self.rounds.decode_turns += 1
            self._step = self._compiled(dict.fromkeys(decoding[: self.token_budget], 1), now)
            actions.append(Start(self._step))
        elif self._next is not None:
            self._run(self._next, now, actions)

    def _signal_if_wanted(self, now: float, actions: list[EngineAction]) -> None:
        task = self._task
        if task is None or task.step is None or task.signalled_at is not None:
            return
        if self.preemption.boundary == "none":
            return
        if self._next is task and not self._turns.is_due(self._decoding, now):
            return
        if self._next is None and task.unfinished:
            return
        task.signalled_at = now
        self.rounds.signals += 1
        if self.preemption.boundary != "chunk":  # a chunk ends by itself
            actions.append(Suspend(task.step.id))

    def _run(self, chosen: PrefillTask | Seq, now: float, actions: list[EngineAction]) -> None:
        if isinstance(chosen, Seq):
            task = self._submit(chosen, now)
        else:
            task = chosen
            self._suspended.remove(task)
        task.since = now
        self._task = self._next = task
        if task.step is None:
            task.step = self._step = self._compiled(self._chunk(task), now)
            actions.append(Start(task.step))
        else:
            self._step = task.step
            self.rounds.resumes += 1
            actions.append(Resume(task.step.id))

    def _submit(self, head: Seq, now: float) -> PrefillTask:
        others = [] if head.coming is not None else self._others(head)
        needs = [self.uncached(seq) for seq in others] if self.config.prefix_caching else [s.tokens for s in others]
        found = self._rules.members(self.uncached(head), needs, head.due - now)
        members = [
            seq for seq in (head, *(others[index] for index in found)) if self._has_room(seq) and self._take(seq)
        ]
        if not members:
            raise ProtocolError(f"no room for {head.id!r}, which was found a moment ago")
        tokens = sum(seq.remaining for seq in members)
        self.rounds.submits += 1
        self.rounds.batched += len(members) - 1
        chunks = -(-tokens // (self.preemption.chunk_tokens or tokens))
        return PrefillTask(members, self._rules.predict(tokens) + (chunks - 1) * self._rules.predict(0))

    def _others(self, head: Seq) -> list[Seq]:
        return [seq for seq in self._ranked if seq is not head and seq.coming is None]

    def _take(self, seq: Seq) -> bool:
        """Admit it, with blocks for its longest possible output. False if there are too few."""
        seq.cached = self.blocks.take_prefix(seq)
        if not self.blocks.extend(seq, self._longest(seq) - seq.computed):
            self.blocks.release(seq)
            return False
        self._ranked.remove(seq)
        self._seats.take(seq)
        return True

    def _compiled(self, planned: dict[Seq, int], now: float) -> Step:
        self.totals.steps += 1
        step = assemble(self.totals.steps, planned, now, copies=self.blocks.take_copies())
        self.totals.step_tokens += step.tokens
        return step

    def _chunk(self, task: PrefillTask) -> dict[Seq, int]:
        """Tokens of the next step: all that remain, or as many as fit into a chunk, member by member."""
        left = self.preemption.chunk_tokens or sum(seq.remaining for seq in task.unfinished)
        planned: dict[Seq, int] = {}
        for seq in task.unfinished:
            if left <= 0:
                break
            planned[seq] = min(seq.remaining, left)
            left -= planned[seq]
        return planned

    # ---- sequences that end early, pauses, decodes ------------------------------------------------------------------

    @property
    def _decoding(self) -> list[Seq]:
        return [seq for seq in self._running.items() if seq.decoding]

    def _forget_dead(self, actions: list[EngineAction]) -> None:
        dead = [task for task in self._suspended if not task.unfinished]
        for task in dead:
            self._suspended.remove(task)
            if task.step is not None:
                actions.append(Discard(task.step.id))
            if self._next is task:
                self._next = None
        if dead:
            self._after_steps()
            self._look_for_room()

    def _give_back(self, seq: Seq) -> None:
        if holds(self._step, seq) or any(holds(task.step, seq) for task in self._suspended):
            self._after_step.append(seq)
        else:
            self.blocks.release(seq)

    def _after_steps(self) -> None:
        """Free the blocks of ended sequences, except those that a running or suspended step still writes."""
        steps = [self._step, *(task.step for task in self._suspended)]
        kept = [seq for seq in self._after_step if any(holds(step, seq) for step in steps)]
        for seq in self._after_step:
            if seq not in kept:
                self.blocks.release(seq)
        self._after_step = kept

    def _drop_kv_if_asked(self) -> None:
        """Postponed until the device is free, when suspended steps can be discarded too."""

    def _drop_all_if_asked(self, now: float, actions: list[EngineAction]) -> None:
        if self._paused is None or not self._paused.release_kv:
            return
        actions.extend(Discard(task.step.id) for task in self._suspended if task.step is not None)
        self._suspended.clear()
        self._next = None
        self._after_steps()
        for seq in self._seats.clear():
            self._forget_coming(seq)
            self._enqueue(seq, now)
        self._forget_prefixes()
