"""The sequences that wait and those that run, most urgent first, the counters of both, and which are evicted when slots
or KV blocks run out.

A queue is sorted by a fixed key (`SeqQueue`) or by a prefill order whose keys change with time (`RankedQueue`).

The least urgent running sequence is evicted first and recomputed later (preemption by recompute, as in vLLM), or copied
to host memory and back (`swapping`). Under a policy that pauses sequences, paused ones are evicted before it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from controller.core.steps import Seq, SeqState
from controller.engine.blocks import BlockManager
from controller.engine.config import EngineConfig
from controller.engine.errors import ProtocolError
from controller.engine.swapping import SwapCounts, Swapping
from controller.policies.batching import Pausing
from controller.policies.ordering.prefill_orders import PrefillOrder

Key = tuple[int, float, str]


def by_priority(seq: Seq) -> Key:
    """Lower priority value first; ties by arrival, then id."""
    return (seq.priority, seq.arrival, seq.id)


def by_arrival(seq: Seq) -> Key:
    return (0, seq.arrival, seq.id)


class SeqQueue:
    """A sorted list. A sequence's key must not change while it is in the queue."""

    def __init__(self, key: Callable[[Seq], Key]) -> None:
        self._key = key
        self._keys: list[Key] = []
        self._seqs: list[Seq] = []

    def add(self, seq: Seq) -> None:
        key = self._key(seq)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._seqs.insert(index, seq)

    def remove(self, seq: Seq) -> None:
        index = bisect_left(self._keys, self._key(seq))
        if index == len(self._seqs) or self._seqs[index] is not seq:
            raise KeyError(seq.id)
        del self._keys[index], self._seqs[index]

    def clear(self) -> list[Seq]:
        seqs, self._seqs, self._keys = self._seqs, [], []
        return seqs

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._seqs)

    def items(self) -> list[Seq]:
        """The live list, read-only."""
        return self._seqs


RankKey = tuple[float, float, float, str]  # the order's pair, arrival, id


class RankedQueue:
    """Prompts in a prefill order whose keys change with time, re-sorted only where a key has changed.

    Under S-EDF a waiting prompt's key changes once, when its slack is used up: O(log n) for each change instead of a
    sort in every round. Call `advance(now)` before reading; `now` must not decrease.
    """

    def __init__(self, order: PrefillOrder) -> None:
        self._order = order
        self._keys: list[RankKey] = []
        self._seqs: list[Seq] = []
        self._held: dict[str, tuple[RankKey, float]] = {}  # id to key and seconds needed
        self._turns: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Seq]:
        """Most urgent first."""
        return iter(self._seqs)

    @property
    def first(self) -> tuple[RankKey, Seq] | None:
        return (self._keys[0], self._seqs[0]) if self._seqs else None

    def key(self, seq: Seq, needed_s: float, now: float) -> RankKey:
        return (*self._order.key(seq.due, needed_s, seq.arrival, now), seq.arrival, seq.id)

    def add(self, seq: Seq, needed_s: float, now: float) -> None:
        key = self.key(seq, needed_s, now)
        self._held[seq.id] = (key, needed_s)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._seqs.insert(index, seq)
        turn = self._order.turns_at(seq.due, needed_s)
        if now < turn < float("inf"):
            heapq.heappush(self._turns, (turn, seq.id))

    def remove(self, seq: Seq) -> None:
        """Raises KeyError if it is not queued."""
        key, _ = self._held.pop(seq.id)
        index = bisect_left(self._keys, key)
        del self._keys[index], self._seqs[index]

    def advance(self, now: float) -> None:
        while self._turns and self._turns[0][0] <= now:
            _, name = heapq.heappop(self._turns)
            held = self._held.get(name)
            if held is None:
                continue
            seq = self._seqs[bisect_left(self._keys, held[0])]
            self.remove(seq)
            self.add(seq, held[1], now)


@dataclass(slots=True)
class Totals:
    """Counts since the start, in tokens unless named otherwise."""

    steps: int = 0
    preemptions: int = 0  # times
    rejected: int = 0  # sequences
    prompt: int = 0  # of sequences that were admitted
    prompt_cached: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    generated: int = 0
    step_tokens: int = 0
    swaps: SwapCounts = field(default_factory=SwapCounts)

    def admitted(self, seq: Seq, prefix_caching: bool) -> None:
        if seq.preemptions:
            return  # counted at its first admission
        self.prompt += seq.prompt_tokens
        self.prompt_cached += seq.cached
        if prefix_caching:
            self.prefix_queries += seq.prompt_tokens
            self.prefix_hits += seq.cached


class Seats:
    """The waiting and the running sequences. `wanted` in its methods: the sequences of the step being composed, which
    only policies that pause sequences provide."""

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        totals: Totals,
        key: Callable[[Seq], Key],
        pausing: Pausing | None,
    ) -> None:
        self.waiting = SeqQueue(key)
        self.running = SeqQueue(key)
        self._config = config
        self._blocks = blocks
        self._totals = totals
        self._pausing = pausing
        self.swaps: Swapping | None = None
        self.unpin: Callable[[], bool] = lambda: False  # ends the oldest checkpoint, if there is one

    def take(self, seq: Seq) -> None:
        """Move a queued sequence that has its blocks to the running ones."""
        self.waiting.remove(seq)
        seq.state = SeqState.RUNNING
        self.running.add(seq)
        self._totals.admitted(seq, self._config.prefix_caching)

    def take_arrived(self, arrived: SeqQueue) -> None:
        """Run sequences whose KV has arrived, ahead of the queue: they hold blocks that the queued ones may need, so
        the other way round neither might ever run."""
        while len(arrived) and len(self.running) < self._config.max_num_seqs:
            seq = arrived.items()[0]
            arrived.remove(seq)
            seq.state = SeqState.RUNNING
            self.running.add(seq)

    def admit(self, seq: Seq, tokens: int, wanted: set[Seq]) -> bool:
        """Give a queued sequence a slot and blocks, evicting only paused ones. False if that is not enough."""
        while len(self.running) >= self._config.max_num_seqs or not self._blocks.fits(seq):
            if (paused := self._spare(wanted)) is not None:
                self.evict(paused)
            elif len(self.running) or not self.unpin():  # with nothing running, nothing else will free blocks
                return False
        seq.cached = self._blocks.take_prefix(seq)
        if self.swaps is not None:
            seq.computed = max(seq.cached, self.swaps.tokens(seq))
        if not self._blocks.extend(seq, tokens):
            raise ProtocolError(f"the policy granted {tokens} tokens beyond the {seq.tokens} of {seq.id!r}")
        if self.swaps is not None:
            self.swaps.join(seq, seq.cached)
        self.take(seq)
        return True

    def reserve(self, seq: Seq, tokens: int, planned: dict[Seq, int], wanted: set[Seq]) -> bool:
        """Take blocks for a running sequence, evicting the least urgent ones, which leave `planned`. True if one was
        evicted that was not paused."""
        evicted = False
        while not self._blocks.extend(seq, tokens):
            if self.unpin():
                continue
            victim = self._spare(wanted) or self.running.items()[-1]
            planned.pop(victim, None)
            self.evict(victim)
            evicted |= victim in wanted or not self._pausing
            if victim is seq:
                return True
        planned[seq] = tokens
        return evicted

    def clear(self) -> list[Seq]:
        """Evict all running sequences, to be recomputed. Returns them, most urgent first."""
        seqs = self.running.clear()
        for seq in seqs:
            self._requeue(seq)
        if self.swaps is not None:
            self.swaps.clear()
        return seqs

    def _spare(self, wanted: set[Seq]) -> Seq | None:
        """The paused sequence to evict first, if any."""
        return self._pausing.spare(self.running.items(), wanted) if self._pausing else None

    def evict(self, seq: Seq) -> None:
        """Take the slot and the blocks of a running sequence, which waits again."""
        self.running.remove(seq)
        if self.swaps is not None:
            self.swaps.leave(seq)
        self._requeue(seq)

    def _requeue(self, seq: Seq) -> None:
        self._blocks.release(seq)
        seq.state = SeqState.WAITING
        seq.preemptions += 1
        self._totals.preemptions += 1
        self.waiting.add(seq)
