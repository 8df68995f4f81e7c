"""Who waits, who runs, and who gives way when seats or KV blocks are short.

When blocks run out, the least urgent running sequence gives its own back and is computed again later (preemption by
recompute, as in vLLM); under a policy that pauses sequences, those that are paused go first.
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
    """`wanted`: those that the step is being composed of; only policies that pause say who that is."""

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
        """A queued sequence whose blocks were found runs from now on."""
        self.waiting.remove(seq)
        seq.state = SeqState.RUNNING
        self.running.add(seq)
        self._totals.admitted(seq, self._config.prefix_caching)

    def take_arrived(self, arrived: SeqQueue) -> None:
        """Ahead of the queue: they hold their blocks, and whoever waits for those would wait for ever."""
        while len(arrived) and len(self.running) < self._config.max_num_seqs:
            seq = arrived.items()[0]
            arrived.remove(seq)
            seq.state = SeqState.RUNNING
            self.running.add(seq)

    def admit(self, seq: Seq, tokens: int, wanted: set[Seq]) -> bool:
        """A seat and blocks for a queued sequence, at the cost of paused ones alone. False: none were found."""
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
        """Blocks for a running sequence, at the cost of the least urgent ones, which leave `planned`. True if one had
        to go that was not merely paused."""
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
        """Everybody gives seat and blocks back; those who had one, most urgent first."""
        seqs = self.running.clear()
        for seq in seqs:
            self._requeue(seq)
        return seqs

    def _spare(self, wanted: set[Seq]) -> Seq | None:
        """Of those that hold KV but are paused, who gives it back first."""
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
