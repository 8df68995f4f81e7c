"""KV blocks: reference counts, prefix reuse, eviction. Bookkeeping only; the blocks' contents live with an executor.

A block is in exactly one of three places: *in use* (referenced by at least one sequence), *cached* (unreferenced, its
contents known by hash, evicted least recently used first) or *empty*. Only full blocks are shared, so a shared block is
never written. vLLM (Kwon et al., SOSP 2023, https://arxiv.org/abs/2309.06180) is the model for block tables.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from hashlib import blake2b

from controller.core.errors import SlacklineError
from controller.core.steps import Seq


class BlockError(SlacklineError):
    """The block accounting is inconsistent: always a bug, never a result of load."""


class BlockManager:
    """Allocates blocks to sequences. `free` includes cached blocks, since they can be evicted at any time."""

    def __init__(
        self, blocks: int, block_size: int, prefix_caching: bool = True, *, copies_blocks: bool = True
    ) -> None:
        """`copies_blocks`: whether a branch may copy a block that its origin has filled in part."""
        self.total = blocks
        self.copies_blocks = copies_blocks
        self._copies: list[tuple[int, int]] = []  # that no step has taken yet
        self.lost: Callable[[int], None] = _ignored  # told of a cached block before it gets other content
        self.block_size = block_size
        self.caching = prefix_caching
        self._refs = [0] * blocks
        self._hash_of: list[Hashable | None] = [None] * blocks
        self._by_hash: dict[Hashable, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._empty = list(range(blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of blocks referenced by a sequence, 0..1."""
        return 1.0 - self.free / self.total

    @property
    def hashes(self) -> Collection[Hashable]:
        """Of all blocks that a new sequence can share."""
        return self._by_hash.keys()

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def cached_tokens(self, seq: Seq) -> int:
        """Tokens of a queued sequence whose KV is cached or its origin's. At least one token is always left to
        compute."""
        whole = len(list(self._prefix(seq))) * self.block_size
        return max(whole, self._of_origin(seq) if self.copies_blocks else 0)

    def _prefix(self, seq: Seq) -> Iterator[int]:
        """Full blocks that it shares: by their hash, and beyond those the ones of its origin."""
        found = 0
        if self.caching:
            extend_hashes(seq, self.block_size, seq.tokens)
            for digest in seq.block_hashes[: (seq.tokens - 1) // self.block_size]:
                block = self._by_hash.get(digest)
                if block is None:
                    break
                found += 1
                yield block
        if seq.origin is not None:
            yield from seq.origin.blocks[found : self._of_origin(seq) // self.block_size]

    def _of_origin(self, seq: Seq) -> int:
        """Tokens of a branch whose KV its origin still has."""
        return 0 if seq.origin is None else min(seq.common, seq.origin.computed, seq.tokens - 1)

    def fits(self, seq: Seq) -> bool:
        """Whether all current tokens of a queued sequence find blocks, not counting its cached prefix twice."""
        shared = list(self._prefix(seq))
        idle = sum(not self._refs[block] for block in shared)
        return self.blocks_for(seq.tokens) - len(shared) <= self.free - idle

    def take_prefix(self, seq: Seq) -> int:
        """Give a queued sequence its cached prefix; returns the tokens it covers."""
        for block in list(self._prefix(seq)):
            self._cached.pop(block, None)
            self._refs[block] += 1
            seq.blocks.append(block)
        seq.computed = len(seq.blocks) * self.block_size
        self._copy_on_write(seq)
        return seq.computed

    def _copy_on_write(self, seq: Seq) -> None:
        """The block that its origin has filled in part is copied for a branch, which will write the rest of it."""
        shared, origin = self._of_origin(seq), seq.origin
        if origin is None or shared <= seq.computed or not self.copies_blocks or not self.extend(seq, 1):
            return
        self._copies.append((origin.blocks[len(seq.blocks) - 1], seq.blocks[-1]))
        seq.computed = shared

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies that the next step has to make, once."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def extend(self, seq: Seq, tokens: int) -> bool:
        """Take blocks for `tokens` more computed tokens. All or nothing: False if there are too few."""
        missing = self.blocks_for(seq.computed + tokens) - len(seq.blocks)
        if missing <= 0:
            return True
        if missing > self.free:
            return False
        empty, refs = self._empty, self._refs
        while len(empty) < missing:
            block, _ = self._cached.popitem(last=False)
            self.lost(block)
            self._unname(block)
            empty.insert(0, block)
        taken = empty[: -missing - 1 : -1]
        del empty[-missing:]
        for block in taken:
            refs[block] = 1
        seq.blocks += taken
        return True

    def _unname(self, block: int) -> None:
        digest, self._hash_of[block] = self._hash_of[block], None
        if digest is not None:
            del self._by_hash[digest]

    def seal(self, seq: Seq, was_computed: int) -> None:
        """Hash the blocks that became full since `was_computed`, so that other sequences can share them."""
        first, last = was_computed // self.block_size, seq.computed // self.block_size
        if first == last or not self.caching:
            return
        extend_hashes(seq, self.block_size, seq.computed)
        self.name(seq, range(first, min(last, len(seq.block_hashes))))

    def name(self, seq: Seq, indices: Iterable[int]) -> None:
        """Let other sequences find these of its full blocks, whose hashes it has."""
        for index in indices:
            digest, block = seq.block_hashes[index], seq.blocks[index]
            if digest not in self._by_hash:  # two sequences computed the same block: the first one is shared
                self._by_hash[digest] = block
                self._hash_of[block] = digest

    def named(self, seq: Seq) -> tuple[int, ...]:
        """Indices of its blocks that other sequences can find."""
        pairs = zip(seq.blocks, seq.block_hashes, strict=False)
        return tuple(index for index, (block, digest) in enumerate(pairs) if self._hash_of[block] == digest)

    def release(self, seq: Seq) -> None:
        """Free its blocks, last one first: of a cached prefix the tail is then evicted before the head, which more
        sequences share."""
        self._free(seq.blocks)
        seq.blocks.clear()
        seq.computed = 0

    def shared(self, seq: Seq) -> int:
        """Its first blocks that another sequence holds too."""
        count = 0
        while count < len(seq.blocks) and self._refs[seq.blocks[count]] > 1:
            count += 1
        return count

    def hold(self, holder: Seq, blocks: Iterable[int]) -> None:
        """Give the holder those of these blocks that nobody has, whatever they contain."""
        idle = {block for block in blocks if not self._refs[block]}
        if not idle:
            return
        self._empty = [block for block in self._empty if block not in idle]
        for block in sorted(idle):
            self._cached.pop(block, None)
            self._refs[block] = 1
            holder.blocks.append(block)

    def trim(self, seq: Seq) -> None:
        """Free the blocks that it has beyond its computed tokens."""
        needed = self.blocks_for(seq.computed)
        self._free(seq.blocks[needed:])
        del seq.blocks[needed:]

    def _free(self, blocks: list[int]) -> None:
        refs, named, empty = self._refs, self._hash_of, self._empty
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                if named[block] is None:
                    empty.append(block)
                else:
                    self._cached[block] = None
        if self._copies:  # nothing is copied to a block that may be another sequence's by then
            freed = {block for block in blocks if not refs[block]}
            self._copies = [copy for copy in self._copies if copy[1] not in freed]

    def forget(self) -> None:
        """Drop every cached prefix. Blocks in use stay, but no further sequence will share them."""
        for digest in list(self._by_hash):
            self._hash_of[self._by_hash.pop(digest)] = None
        self._empty.extend(self._cached)
        self._cached.clear()

    def check(self, holders: Iterable[Seq]) -> None:
        """Raise BlockError unless every block is in exactly one place and every reference count matches `holders`."""
        held = Counter(block for seq in holders for block in seq.blocks)
        places = Counter(self._empty) + Counter(list(self._cached)) + Counter(list(held))
        if places != Counter(range(self.total)):
            raise BlockError(f"blocks in no place or in several: {places - Counter(range(self.total))}")
        if any(self._refs[block] != held[block] for block in range(self.total)):
            raise BlockError("reference counts differ from holders")
        named = {digest: block for block, digest in enumerate(self._hash_of) if digest is not None}
        if named != self._by_hash or any(self._hash_of[block] is None for block in self._cached):
            raise BlockError("hashes and blocks do not match one to one")
        if any(self._hash_of[block] is not None for block in self._empty):
            raise BlockError("an empty block has a name")


def _ignored(block: int) -> None:
    """Nobody needs it."""


# ---- hashes of prefixes ---------------------------------------------------------------------------------------------


def extend_hashes(seq: Seq, block_size: int, tokens: int) -> None:
    """Make `seq.block_hashes` cover every full block among the first `tokens` tokens, as far as ids are known."""
    if seq.token_ids is None:
        return
    hashes = seq.block_hashes
    for index in range(len(hashes), tokens // block_size):
        parent = hashes[-1] if hashes else blake2b(seq.salt, digest_size=16).digest()
        content = array("q", seq.token_ids[index * block_size : (index + 1) * block_size]).tobytes()
        hashes.append(blake2b(parent + content, digest_size=16).digest())  # type: ignore[operator]
