"""The engine's scheduler: continuous batching over KV blocks, as a state machine without I/O.

It takes events and the time, and returns the step to run next and the tokens to emit. One step runs at a time. The
batching policy chooses which tokens run; this class keeps the invariants: no token is lost or duplicated, blocks are
accounted for, and the most urgent sequence always makes progress. An evicted sequence (engine.seats) keeps its output,
and its sampled tokens are recomputed with its prompt, unless its KV comes back from host memory (engine.swapping).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from controller.core.steps import (
    NO_SWAPS,
    Aborted,
    Added,
    CacheReset,
    ComingPrefix,
    Emit,
    EngineAction,
    EngineEvent,
    EngineReply,
    Finish,
    FinishReason,
    Landed,
    Lend,
    Paused,
    PrefixEnded,
    Reject,
    Release,
    Reserve,
    Reserved,
    Resumed,
    Sampled,
    Seq,
    SeqState,
    Start,
    Step,
    StepDone,
    StepRan,
    StepsDone,
)
from controller.engine import leaps
from controller.engine.assembly import assemble, lead
from controller.engine.blocks import BlockManager
from controller.engine.checkpoints import Checkpoints
from controller.engine.config import EngineConfig
from controller.engine.disaggregation import KvInTransit
from controller.engine.errors import ProtocolError
from controller.engine.kv_costs import KvCosts
from controller.engine.seats import Seats, Totals, by_arrival, by_priority
from controller.engine.swapping import Swapping
from controller.policies.batching import Batching, Pausing, Weighing


class EngineScheduler:
    """Continuous batching. Also the EngineView that its batching policy reads."""

    evicts = True  # whether a running sequence may lose its blocks to another
    whole_prompts = False  # True: a prompt is one step however long it is, and may be suspended in the middle
    overlaps_copies = False  # True: a prompt is computed while layers of its prefix are still copied here

    def __init__(self, config: EngineConfig, batching: Batching, former: EngineScheduler | None = None) -> None:
        """`former`: an idle scheduler of the same configuration that this one takes the place of. Its blocks, with the
        prefixes that they cache, and its counts go on."""
        self.config = config
        self.batching = batching
        self._steady = bool(getattr(batching, "steady", False))
        self._pausing: Pausing | None = batching if isinstance(batching, Pausing) else None
        if former is None:
            copies = config.copies_blocks
            self.blocks = BlockManager(config.kv_blocks, config.block_size, config.prefix_caching, copies_blocks=copies)
            self.totals = Totals()
        else:
            former.checkpoints.clear()
            self.blocks, self.totals = former.blocks, former.totals
        self.checkpoints: Checkpoints = Checkpoints(self.blocks, int(config.pinned_share * config.kv_blocks))
        key = by_priority if config.scheduling_policy == "priority" else by_arrival
        self._seats = Seats(config, self.blocks, self.totals, key, self._pausing)
        self._seats.unpin = self.checkpoints.drop
        self.costs: KvCosts | None = None
        self.swaps: Swapping | None = None
        self._leaving = Seq("", 0.0, 0, 0)  # holds the blocks that the running step copies to host memory
        if former is not None and former.costs is not None:
            self.measure(former.costs)
        self._waiting, self._running = self._seats.waiting, self._seats.running
        self._in_transit = KvInTransit(self.blocks, key)
        self._ids: set[str] = set()
        self._step: Step | None = None
        self._after_step: list[Seq] = []  # ended while their step runs: it still writes their blocks
        self._paused: Paused | None = None
        self._evicted = False  # while the running step was composed

    def measure(self, costs: KvCosts) -> None:
        """Weigh evictions by these costs from now on, which learn from each step. Only while idle. Without them all
        evicted sequences are recomputed."""
        self.costs = costs
        if self.config.swap_blocks and self.evicts:
            self.swaps = self._seats.swaps = Swapping(self.config.swap_blocks, self.blocks, costs, self.totals.swaps)
        if isinstance(self.batching, Weighing):
            self.batching.weigh_by(costs)

    # ---- EngineView ---------------------------------------------------------------------------------------------

    @property
    def token_budget(self) -> int:
        return self.config.max_num_batched_tokens

    @property
    def max_num_seqs(self) -> int:
        return self.config.max_num_seqs

    @property
    def running(self) -> Sequence[Seq]:
        return self._running.items()

    def waiting(self) -> Iterator[Seq]:
        return iter(self._waiting)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def uncached(self, seq: Seq) -> int:
        cached = self.blocks.cached_tokens(seq)
        return seq.tokens - (cached if self.swaps is None else max(cached, self.swaps.tokens(seq)))

    @property
    def paused(self) -> bool:
        return self._paused is not None

    @property
    def idle(self) -> bool:
        return self._step is None and not self._ids and not self._in_transit.held

    @property
    def arrived_count(self) -> int:
        """Sequences whose KV has arrived from another engine and that have no slot yet."""
        return len(self._in_transit.arrived)

    # ---- events -------------------------------------------------------------------------------------------------

    def handle(self, events: Sequence[EngineEvent], now: float) -> EngineReply:
        actions: list[EngineAction] = []
        for event in events:
            ran = self._step
            self._apply(event, now, actions)
            self.batching.observe(event, now)
            if ran is not None and isinstance(event, StepDone | StepsDone):
                self.batching.observe(StepRan(ran, getattr(event, "repeats", 1), event.seconds), now)
        anybody = self._running or self._waiting or self._in_transit.arrived
        if self._step is None and self._paused is None and anybody:
            self._step = self._compose(now)
            if self._step is not None:
                actions.append(Start(self._step))
        return EngineReply(actions)

    def _apply(self, event: EngineEvent, now: float, actions: list[EngineAction]) -> None:
        match event:
            case StepDone():
                self._step_done(event, now, actions)
            case StepsDone():
                self._steps_done(event, now, actions)
            case Added(seq):
                self._add(seq, actions)
            case Aborted(seq, reason):
                self._abort(seq, reason, actions)
            case Reserve(seq, needed):
                self._reserve_for(seq, needed, actions)
            case Landed(seq):
                self._in_transit.land(seq)
            case PrefixEnded(seq, tokens):
                self._in_transit.keep_prefix(seq, tokens)
                self._end(seq, FinishReason.STOP)
            case Lend(seq):
                self._in_transit.lend(seq)
            case Release(seq):
                self._in_transit.release(seq)
                self.checkpoints.release(seq)
            case Paused():
                self._paused = event
                self._drop_kv_if_asked()
            case Resumed():
                self._paused = None
            case CacheReset():
                self._forget_prefixes()

    def _add(self, seq: Seq, actions: list[EngineAction]) -> None:
        if seq.id in self._ids:
            raise ProtocolError(f"sequence id {seq.id!r} is in use")
        if (code := self._refusal(seq)) is not None:
            seq.state, self.totals.rejected = SeqState.FINISHED, self.totals.rejected + 1
            actions.append(Reject(seq, code))
            return
        self._ids.add(seq.id)
        if seq.branch_of:
            self.checkpoints.join(seq)
        if seq.coming is not None:
            self._join_coming(seq, seq.coming)
        self._waiting.add(seq)

    def _join_coming(self, seq: Seq, coming: ComingPrefix) -> None:
        """Share the blocks of a prefix that is still copied, if steps can wait for its layers."""
        if not self.overlaps_copies or coming.seq.state is not SeqState.ARRIVING:
            seq.coming = None
            return
        seq.origin, seq.common = coming.seq, coming.seq.tokens
        coming.seq.computed = coming.seq.tokens

    def _reserve_for(self, seq: Seq, needed: bool, actions: list[EngineAction]) -> None:
        if seq.id in self._ids:
            raise ProtocolError(f"sequence id {seq.id!r} is in use")
        too_long = seq.tokens >= self.config.max_model_len
        reserved = not too_long and self._in_transit.reserve(seq)
        while needed and not reserved and not too_long and self.checkpoints.drop():
            reserved = self._in_transit.reserve(seq)
        if not reserved:
            actions.append(Reject(seq, "too_long" if too_long else "no_room"))
        else:
            self._ids.add(seq.id)
            actions.append(Reserved(seq))

    def _refusal(self, seq: Seq) -> str | None:
        if seq.tokens >= self.config.max_model_len:
            return "too_long"
        bound = self.config.max_waiting
        free_slots = self.config.max_num_seqs - len(self._running)
        if bound is not None and len(self._waiting) - free_slots >= bound:  # not those for whom a slot is free
            return "queue_full"
        return None

    def _abort(self, seq: Seq, reason: FinishReason, actions: list[EngineAction]) -> None:
        if seq.state is SeqState.FINISHED:
            return
        if seq.state is SeqState.WAITING:
            self._waiting.remove(seq)
        elif seq.state is SeqState.ARRIVING:
            self._in_transit.drop(seq)
        else:
            self._running.remove(seq)
            self._give_back(seq)
        self._end(seq, reason)
        actions.append(Finish(seq, reason))

    def _end(self, seq: Seq, reason: FinishReason) -> None:
        seq.state, seq.finish = SeqState.FINISHED, reason
        self._ids.discard(seq.id)
        if self.swaps is not None:
            self.swaps.forget(seq)

    def _give_back(self, seq: Seq) -> None:
        if (step := self._step) is not None and (seq in step.decodes or any(chunk.seq is seq for chunk in step.chunks)):
            self._after_step.append(seq)
        else:
            self.blocks.release(seq)

    def _drop_kv_if_asked(self) -> None:
        if self._step is not None or self._paused is None or not self._paused.release_kv:
            return
        self._seats.clear()
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        self.checkpoints.clear()
        self.blocks.forget()
        if self.swaps is not None:
            self.swaps.cache_reset()
        self._in_transit.forget_prefixes()

    # ---- a step's end -------------------------------------------------------------------------------------------

    def _step_done(self, done: StepDone, now: float, actions: list[EngineAction]) -> None:
        step = self._take_step(done.step_id)
        if self.costs is not None:
            self.costs.observe(step, done.seconds, done.out_s, done.back_s)
        for chunk in step.chunks:
            self._advance(chunk.seq, chunk.length)
        for seq in step.decodes:
            self._advance(seq, 1)
        for sampled in done.sampled:
            if sampled.seq.state is SeqState.RUNNING:
                actions.append(self._sampled(sampled, now))
        self._after_steps()

    def _take_step(self, step_id: int) -> Step:
        step, self._step = self._step, None
        if step is None or step.id != step_id:
            raise ProtocolError(f"step {step_id} is not running")
        if self.swaps is not None:
            self.swaps.copied()
        return step

    def _after_steps(self) -> None:
        for seq in self._after_step:
            self.blocks.release(seq)
        self._after_step.clear()
        if self._leaving.blocks:
            self.blocks.release(self._leaving)
        self._drop_kv_if_asked()

    # ---- leaps (engine.leaps) -----------------------------------------------------------------------------------

    def repeats(self) -> int:
        """How often the running step will run, itself included, if no event but its end comes.

        More than 1 only for a steady batching policy while all running sequences decode: then no prompt found a slot, a
        token or a block, and none will until a sequence ends or blocks run out.
        """
        step = self._step
        if step is None or step.chunks or self._evicted or self._paused is not None or step.swaps != NO_SWAPS:
            return 1
        if not self._pausing and (len(step.decodes) != len(self._running) or not self._steady):
            return 1
        times = leaps.repeats(step, self.blocks, self.config)
        return min(times, self._pausing.stays()) if self._pausing else times

    def _steps_done(self, done: StepsDone, now: float, actions: list[EngineAction]) -> None:
        step, times = self._take_step(done.step_id), done.repeats
        for chunk in step.chunks:
            self._advance(chunk.seq, chunk.length)
            if chunk.last and chunk.seq.state is SeqState.RUNNING:
                self._grow(chunk.seq, now, actions)
        generated, ended = leaps.decode(step, times, now, self.blocks, self.config)
        for seq in ended:
            self._finish_if_done(seq, actions)
        self.totals.generated += generated
        self.totals.steps += times - 1
        self.totals.step_tokens += (times - 1) * step.tokens
        self._after_steps()

    def _grow(self, seq: Seq, now: float, actions: list[EngineAction]) -> None:
        seq.output_tokens += 1
        if seq.first_token_at is None:
            seq.first_token_at = now
        seq.last_token_at = now
        self.totals.generated += 1
        self._finish_if_done(seq, actions)

    def _finish_if_done(self, seq: Seq, actions: list[EngineAction]) -> None:
        if (reason := self._end_if_done(seq, None)) is not None:
            actions.append(Finish(seq, reason))

    def _advance(self, seq: Seq, tokens: int) -> None:
        before = seq.computed
        seq.computed += tokens
        self.blocks.seal(seq, before)

    def _sampled(self, sampled: Sampled, now: float) -> Emit:
        seq, token, _ = sampled
        seq.output_tokens += 1
        if seq.token_ids is not None:
            seq.token_ids.append(token)
        if seq.first_token_at is None:
            seq.first_token_at = now
        seq.last_token_at = now
        self.totals.generated += 1
        return Emit(seq, token, self._end_if_done(seq, sampled))

    def _end_if_done(self, seq: Seq, sampled: Sampled | None) -> FinishReason | None:
        reason = self._reason(seq, sampled)
        if reason is not None:
            self._running.remove(seq)
            self._end(seq, reason)
            if seq.keep_kv:
                self._in_transit.hold(seq)
            elif seq.checkpoint:
                self.checkpoints.keep(seq)
            else:
                self.blocks.release(seq)
        return reason

    def _reason(self, seq: Seq, sampled: Sampled | None) -> FinishReason | None:
        if sampled is not None and seq.output_tokens > seq.min_tokens:
            if sampled.eos and not seq.ignore_eos:
                return FinishReason.STOP
            if sampled.token in seq.stop_tokens:
                seq.stopped_by = sampled.token
                return FinishReason.STOP
        if seq.output_tokens >= seq.max_tokens or seq.tokens >= self.config.max_model_len:
            return FinishReason.LENGTH
        return None

    # ---- the next step ------------------------------------------------------------------------------------------

    def _compose(self, now: float) -> Step | None:
        self._seats.take_arrived(self._in_transit.arrived)
        self._evicted = False
        if self.swaps is not None:
            self.swaps.begin()
        grants = self.batching.compose(self, now)
        ahead = lead(grants, self.blocks)
        planned = self._plan(grants, len(ahead.decodes)) if len(ahead.decodes) < len(grants) else {}
        if self._evicted:
            ahead = ahead.still_running()
        if not planned and not ahead.decodes and self._running:
            # The policy granted only queued sequences, which found no blocks: run one that holds blocks
            seq = self._running.items()[0]
            self._seats.reserve(seq, min(seq.remaining, self.token_budget), planned, {seq for seq, _ in grants})
        if not planned and not ahead.decodes and self._in_transit.arrived and not self._running:
            return self._compose(now)  # the last one evicted itself: its slot goes to a sequence that holds blocks
        if not planned and not ahead.decodes:
            if self.swaps is not None:
                self.swaps.cancel()
            return None
        self.totals.steps += 1
        swaps = NO_SWAPS if self.swaps is None else self.swaps.take()
        step = assemble(self.totals.steps, planned, now, ahead, self.blocks.take_copies(), swaps)
        self.blocks.hold(self._leaving, (block for block, _ in swaps.out))  # no transfer may write them meanwhile
        self.totals.step_tokens += step.tokens
        return step

    def _plan(self, grants: Sequence[tuple[Seq, int]], first: int) -> dict[Seq, int]:
        """Tokens by sequence, in order, of the grants from index `first`, as far as there are blocks."""
        planned: dict[Seq, int] = {}
        wanted = {seq for seq, _ in grants} if self._pausing else set()
        held, running, size = False, SeqState.RUNNING, self.config.block_size
        for seq, tokens in islice(grants, first, None):
            if seq.state is running and seq.computed + tokens <= len(seq.blocks) * size:
                planned[seq] = tokens  # the usual case: it has its blocks
            elif seq.state is running:
                self._evicted |= self._seats.reserve(seq, tokens, planned, wanted)
            elif held or self._evicted or not self._seats.admit(seq, tokens, wanted):
                held = True  # no queued sequence may overtake one that found no blocks
            else:
                planned[seq] = tokens
        return planned

    # ---- tests and idle loops -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless queues, states and blocks agree. Linear in blocks: for tests and idle moments."""
        holders = [*self._in_transit.holders(), *self.checkpoints.holders(), self._leaving]
        if self.swaps is not None:
            self.swaps.check(self._waiting)
        self.blocks.check([*self._running, *self._after_step, *holders])
        for queue, state in ((self._waiting, SeqState.WAITING), (self._running, SeqState.RUNNING)):
            if any(seq.state is not state for seq in queue):
                raise ProtocolError(f"a sequence in the {state} queue is in another state")
        if len(self._waiting) + len(self._running) + self._in_transit.coming != len(self._ids):
            raise ProtocolError("ids known and ids queued differ")
