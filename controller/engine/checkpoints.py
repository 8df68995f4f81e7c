"""KV of ended sequences that stays for branches: a branch shares the full blocks and copies the one filled in part.

A checkpoint holds its blocks like a running sequence, so they are neither evicted nor written. It ends with Release, at
the end of its lease or after its last branch, as the driver says; branches that run then keep what they share. All
checkpoints hold a bounded share of the blocks, and they give way where a sequence could not go on otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from controller.core.steps import Seq
from controller.engine.blocks import BlockManager


class Checkpoints:
    """By salt and name: a tenant's branches find its own checkpoints alone. `most`: blocks of all of them."""

    def __init__(self, blocks: BlockManager, most: int) -> None:
        self._blocks = blocks
        self._most = most
        self._kept: dict[tuple[bytes, str], Seq] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def held(self) -> int:
        """Blocks, each as often as checkpoints share it."""
        return sum(len(seq.blocks) for seq in self._kept.values())

    def keep(self, seq: Seq) -> None:
        """Of a sequence that has just ended: its blocks stay, and the oldest checkpoints end if there are too many. One
        that is larger than all may be together is not kept, and ends none."""
        self._blocks.trim(seq)
        before = self._kept.pop(_name(seq), None)
        if before is not None:
            self._blocks.release(before)
        if len(seq.blocks) > self._most:
            self._blocks.release(seq)
            return
        self._kept[_name(seq)] = seq
        while self.held > self._most:
            self.drop()

    def join(self, seq: Seq) -> None:
        """Find the origin of a branch. Without it the branch is computed like any other sequence."""
        found = self._kept.get((seq.salt, seq.branch_of))
        if found is None or found.token_ids is None or seq.token_ids is None:
            return
        seq.origin = found
        pairs = zip(seq.token_ids, found.token_ids, strict=False)
        seq.common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def release(self, seq: Seq) -> None:
        if self._kept.get(_name(seq)) is seq:
            del self._kept[_name(seq)]
            self._blocks.release(seq)

    def drop(self) -> bool:
        """End the oldest one. False if there is none."""
        if not self._kept:
            return False
        self._blocks.release(self._kept.pop(next(iter(self._kept))))
        return True

    def clear(self) -> None:
        while self.drop():
            continue

    def holders(self) -> Iterator[Seq]:
        yield from self._kept.values()

    def holds(self, seq: Seq) -> bool:
        return self._kept.get(_name(seq)) is seq


def _name(seq: Seq) -> tuple[bytes, str]:
    return seq.salt, seq.checkpoint
