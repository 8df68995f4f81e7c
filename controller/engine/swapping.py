"""KV of evicted sequences in host memory: which blocks are copied out and back, and whether that is worth it.

Bookkeeping only, like `blocks`; an executor copies before a step computes anything: out, then back. Host memory is a
fixed number of blocks. An evicted sequence is copied out if that and the way back cost less than computing it again
(`kv_costs`) and there is room; otherwise it is recomputed. The copies are of the step that is being composed, so a
sequence that gets a slot and loses it within one composition keeps what it had in host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.core.steps import Seq, Swaps
from controller.engine.blocks import BlockManager
from controller.engine.errors import ProtocolError
from controller.engine.kv_costs import KvCosts


class SwapChoice(NamedTuple):
    """Of one evicted sequence. `reason`: swap_cheaper, recompute_cheaper, no_room or not_measured. Seconds are
    estimates; None: not known."""

    swapped: bool
    reason: str
    tokens: int
    swap_s: float | None
    recompute_s: float | None


REASONS = ("swap_cheaper", "recompute_cheaper", "no_room", "not_measured")


@dataclass(slots=True)
class SwapCounts:
    """Since the start: evicted sequences by the reason of their choice, and blocks copied."""

    choices: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))
    out: int = 0
    back: int = 0


class _Held(NamedTuple):
    """What host memory has of a sequence: its first `tokens` tokens, block by block. `named`: indices of the blocks
    that were in the prefix cache when it left and that no reset of the cache has made outdated."""

    tokens: int
    hosts: list[int]
    named: tuple[int, ...]


class Swapping:
    """`room`: blocks of host memory. `counts` goes on when a scheduler takes the place of another."""

    def __init__(self, room: int, blocks: BlockManager, costs: KvCosts, counts: SwapCounts) -> None:
        self.room, self._blocks, self._costs, self.counts = room, blocks, costs, counts
        self._free = list(range(room - 1, -1, -1))
        self._held: dict[Seq, _Held] = {}
        self._outs: dict[Seq, list[tuple[int, int]]] = {}  # of the step that is being composed
        self._backs: dict[Seq, tuple[_Held, list[tuple[int, int]]]] = {}
        self._joined: set[Seq] = set()  # in this composition
        self._copied: list[tuple[Seq, tuple[int, ...]]] = []  # indices of blocks that the running step copies back
        self.last: SwapChoice | None = None

    @property
    def used(self) -> int:
        return self.room - len(self._free)

    def tokens(self, seq: Seq) -> int:
        """Tokens of a queued sequence whose KV is in host memory."""
        held = self._held.get(seq)
        return 0 if held is None else held.tokens

    def leave(self, seq: Seq) -> bool:
        """A sequence is evicted and still has its blocks: plan its copy. False: it will be recomputed."""
        if seq in self._joined:  # its blocks have no content yet
            self._joined.discard(seq)
            if (returning := self._backs.pop(seq, None)) is not None:
                self._held[seq] = returning[0]
            return returning is not None
        needed = self._blocks.blocks_for(seq.computed)
        if not needed:
            return False
        self.last = choice = self._weigh(seq, needed)
        self.counts.choices[choice.reason] += 1
        if choice.swapped:
            hosts = [self._free.pop() for _ in range(needed)]
            self._held[seq] = _Held(seq.computed, hosts, self._blocks.named(seq))
            self._outs[seq] = list(zip(seq.blocks, hosts, strict=False))
        elif choice.reason == "recompute_cheaper":
            self._costs.copies_looked_dearer()
        return choice.swapped

    def _weigh(self, seq: Seq, needed: int) -> SwapChoice:
        """Full blocks that others hold too will still be cached: neither way is charged to have them again. All are
        copied out, since that may change meanwhile."""
        shared = min(self._blocks.shared(seq), needed)
        swap_s, out_s = self._costs.swap_s(needed - shared), self._costs.swap_s(shared, both=False)
        if swap_s is not None and out_s is not None:
            swap_s += out_s
        whole = self._costs.recompute_s(seq.computed)
        before = self._costs.recompute_s(shared * self._blocks.block_size)
        recompute_s = None if whole is None or before is None else max(0.0, whole - before)
        if swap_s is None or recompute_s is None:
            return SwapChoice(False, "not_measured", seq.computed, swap_s, recompute_s)
        if swap_s >= recompute_s:
            return SwapChoice(False, "recompute_cheaper", seq.computed, swap_s, recompute_s)
        if needed > len(self._free):
            return SwapChoice(False, "no_room", seq.computed, swap_s, recompute_s)
        return SwapChoice(True, "swap_cheaper", seq.computed, swap_s, recompute_s)

    def join(self, seq: Seq, cached: int) -> None:
        """A queued sequence has got its blocks, the first `cached` tokens of them with content: plan the copy back of
        the others that host memory has."""
        self._joined.add(seq)
        held = self._held.pop(seq, None)
        if held is None:
            return
        first = cached // self._blocks.block_size if cached < held.tokens else len(held.hosts)
        pairs = zip(held.hosts[first:], seq.blocks[first : len(held.hosts)], strict=True)
        self._backs[seq] = (held, list(pairs))

    def take(self) -> Swaps:
        """The copies that the step which has been composed makes. Host blocks that it reads are free for later ones."""
        out = tuple(pair for pairs in self._outs.values() for pair in pairs)
        back = tuple(pair for _, pairs in self._backs.values() for pair in pairs)
        self._copied.clear()
        for seq, (held, pairs) in self._backs.items():
            self._free.extend(held.hosts)
            first = len(held.hosts) - len(pairs)
            self._copied.append((seq, tuple(index for index in held.named if index >= first)))
        self._outs.clear()
        self._backs.clear()
        self._joined.clear()
        self.counts.out += len(out)
        self.counts.back += len(back)
        return Swaps(out, back)

    def copied(self) -> None:
        """The step that was taken last has ended, so the blocks that it copied back have content. Call this before
        their sequences give them up: those that were in the prefix cache before are in it again."""
        for seq, indices in self._copied:
            self._blocks.name(seq, indices)
        self._copied.clear()

    def cache_reset(self) -> None:
        """The prefix cache was emptied: what was computed before goes on to be used, but not by other sequences."""
        self._held = {seq: held._replace(named=()) for seq, held in self._held.items()}
        self._copied.clear()

    def cancel(self) -> None:
        """No step was composed: what should have been copied out is recomputed, since its blocks may be written."""
        for seq in list(self._outs):
            self.forget(seq)
        self._joined.clear()

    def forget(self, seq: Seq) -> None:
        """It has ended, or its KV is of no use any more."""
        self._outs.pop(seq, None)
        if (held := self._held.pop(seq, None)) is not None:
            self._free.extend(held.hosts)

    def clear(self) -> None:
        for seq in list(self._held):
            self.forget(seq)

    def check(self, waiting: Iterable[Seq]) -> None:
        """Raise ProtocolError unless every host block is in one place, and held for a queued sequence."""
        places = Counter(self._free) + Counter(host for held in self._held.values() for host in held.hosts)
        if places != Counter(range(self.room)):
            raise ProtocolError("host blocks in no place or in several")
        if self._outs or self._backs or not set(self._held) <= set(waiting):
            raise ProtocolError("host memory is held for a sequence that is not queued")
