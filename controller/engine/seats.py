"""Which sequences wait, which run, and which are evicted when slots or KV blocks run out.

The least urgent running sequence is evicted first and recomputed later (preemption by recompute, as in vLLM). Under a
policy that pauses sequences, paused ones are evicted before it.
"""

from __future__ import annotations

from collections.abc import Callable

from controller.core.steps import Seq, SeqState
from controller.engine.blocks import BlockManager
from controller.engine.config import EngineConfig
from controller.engine.errors import ProtocolError
from controller.engine.queue import Key, SeqQueue
from controller.engine.totals import Totals
from controller.policies.batching import Pausing


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
            if (paused := self._spare(wanted)) is None:
                return False
            self._evict(paused)
        seq.cached = self._blocks.take_prefix(seq)
        if not self._blocks.extend(seq, tokens):
            raise ProtocolError(f"the policy granted {tokens} tokens beyond the {seq.tokens} of {seq.id!r}")
        self.take(seq)
        return True

    def reserve(self, seq: Seq, tokens: int, planned: dict[Seq, int], wanted: set[Seq]) -> bool:
        """Take blocks for a running sequence, evicting the least urgent ones, which leave `planned`. True if one was
        evicted that was not paused."""
        evicted = False
        while not self._blocks.extend(seq, tokens):
            victim = self._spare(wanted) or self.running.items()[-1]
            planned.pop(victim, None)
            self._evict(victim)
            evicted |= victim in wanted or not self._pausing
            if victim is seq:
                return True
        planned[seq] = tokens
        return evicted

    def clear(self) -> list[Seq]:
        """Evict all running sequences. Returns them, most urgent first."""
        seqs = self.running.clear()
        for seq in seqs:
            self._requeue(seq)
        return seqs

    def _spare(self, wanted: set[Seq]) -> Seq | None:
        """The paused sequence to evict first, if any."""
        return self._pausing.spare(self.running.items(), wanted) if self._pausing else None

    def _evict(self, seq: Seq) -> None:
        self.running.remove(seq)
        self._requeue(seq)

    def _requeue(self, seq: Seq) -> None:
        self._blocks.release(seq)
        seq.state = SeqState.WAITING
        seq.preemptions += 1
        self._totals.preemptions += 1
        self.waiting.add(seq)
