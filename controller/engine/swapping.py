"""KV of evicted sequences in host memory: which blocks are copied out and back, and whether that is worth it.

Bookkeeping only, like `blocks`; an executor copies before a step computes anything: out, then back. Host memory is a
fixed number of blocks. An evicted sequence is copied out if that and the way back cost less than computing it again
(`kv_costs`) and there is room; otherwise it is recomputed. The copies are of the step that is being composed, so a
sequence that gets a slot and loses it within one composition keeps what it had in host memory.

Blocks of its prefix that others hold too, and that the prefix cache knows, are not copied out with the others: they
will usually still be there. Each is copied by the step that gives it other content, if that comes first.
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
    that were in the prefix cache when it left and that no reset of the cache has made outdated. `later`: by index, KV
    blocks that have not been copied."""

    tokens: int
    hosts: list[int]
    named: tuple[int, ...]
    later: dict[int, int]


class Swapping:
    """`room`: blocks of host memory. `counts` goes on when a scheduler takes the place of another."""

    def __init__(self, room: int, blocks: BlockManager, costs: KvCosts, counts: SwapCounts) -> None:
        self.room, self._blocks, self._costs, self.counts = room, blocks, costs, counts
        self._free = list(range(room - 1, -1, -1))
        self._held: dict[Seq, _Held] = {}
        self._outs: dict[Seq, list[tuple[int, int]]] = {}  # of the step that is being composed
        self._backs: dict[Seq, tuple[_Held, list[tuple[int, int]]]] = {}
        self._joined: set[Seq] = set()  # in this composition
        self._awaited: dict[int, set[Seq]] = {}  # by KV block that has not been copied, whose it is
        self._composing = False
        blocks.lost = self.lost
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
                self._keep(seq, returning[0])
            return returning is not None
        needed = self._blocks.blocks_for(seq.computed)
        if not needed:
            return False
        self.last = choice = self._weigh(seq, needed)
        self.counts.choices[choice.reason] += 1
        if choice.swapped:
            hosts = [self._free.pop() for _ in range(needed)]
            named = self._blocks.named(seq)
            later = {index: seq.blocks[index] for index in self._shared(seq, needed)}
            self._keep(seq, _Held(seq.computed, hosts, named, later))
            pairs = enumerate(zip(seq.blocks, hosts, strict=False))
            self._outs[seq] = [pair for index, pair in pairs if index not in later]
        elif choice.reason == "recompute_cheaper":
            self._costs.copies_looked_dearer()
        return choice.swapped

    def _keep(self, seq: Seq, held: _Held) -> None:
        self._held[seq] = held
        seq.swapped, seq.back_s = held.tokens, self._costs.back_s(len(held.hosts) - len(held.later))
        for block in held.later.values():
            self._awaited.setdefault(block, set()).add(seq)

    def _lose(self, seq: Seq) -> _Held | None:
        seq.swapped, seq.back_s = 0, 0.0
        held = self._held.pop(seq, None)
        for block in () if held is None else held.later.values():
            self._awaited[block].discard(seq)
            if not self._awaited[block]:
                del self._awaited[block]
        return held

    def _shared(self, seq: Seq, needed: int) -> list[int]:
        """Indices of its first blocks that others hold too and that it will find again."""
        named = set(self._blocks.named(seq))
        return [index for index in range(min(self._blocks.shared(seq), needed)) if index in named]

    def lost(self, block: int) -> None:
        """A cached block gets other content: copy it, or give up the sequences that need it if it is written at once,
        as by a transfer."""
        for seq in self._awaited.pop(block, ()):
            held = self._held[seq]
            index = next(index for index, each in held.later.items() if each == block)
            del held.later[index]
            if self._composing:
                self._outs.setdefault(seq, []).append((block, held.hosts[index]))
            else:
                self.forget(seq)

    def _weigh(self, seq: Seq, needed: int) -> SwapChoice:
        """Cached blocks that others hold too will still be there: neither way is charged to have them again."""
        shared = len(self._shared(seq, needed))
        swap_s = self._costs.swap_s(needed - shared)
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
        held = self._lose(seq)
        if held is None:
            return
        first = cached // self._blocks.block_size if cached < held.tokens else len(held.hosts)
        for index in [index for index in held.later if index >= first]:  # one before it is cached no more
            self._outs.setdefault(seq, []).append((held.later.pop(index), held.hosts[index]))
        pairs = zip(held.hosts[first:], seq.blocks[first : len(held.hosts)], strict=True)
        self._backs[seq] = (held, list(pairs))

    def begin(self) -> None:
        """A step is being composed: what is copied out is copied before anything else gets its block."""
        self._composing = True

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
        self._composing = False
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
        for seq in [seq for seq, held in self._held.items() if held.later]:
            self.forget(seq)  # what was not copied cannot be found again
        self._held = {seq: held._replace(named=()) for seq, held in self._held.items()}
        self._copied.clear()

    def cancel(self) -> None:
        """No step was composed: what should have been copied out is recomputed, since its blocks may be written."""
        for seq in list(self._outs):
            self.forget(seq)
        self._joined.clear()
        self._composing = False

    def forget(self, seq: Seq) -> None:
        """It has ended, or its KV is of no use any more."""
        self._outs.pop(seq, None)
        if (held := self._lose(seq)) is not None:
            self._free.extend(held.hosts)

    def clear(self) -> None:
        for seq in list(self._held):
            self.forget(seq)

    def check(self, waiting: Iterable[Seq]) -> None:
        """Raise ProtocolError unless every host block is in one place, and held for a queued sequence."""
        places = Counter(self._free) + Counter(host for held in self._held.values() for host in held.hosts)
        if places != Counter(range(self.room)):
            raise ProtocolError("host blocks in no place or in several")
        awaited = {block for held in self._held.values() for block in held.later.values()}
        if awaited != self._awaited.keys():
            raise ProtocolError("blocks that are copied later differ from those that are waited for")
        if self._outs or self._backs or not set(self._held) <= set(waiting):
            raise ProtocolError("host memory is held for a sequence that is not queued")
