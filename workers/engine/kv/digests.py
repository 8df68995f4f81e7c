"""What another engine had in its prefix cache a moment ago, so that not every engine is asked about every prompt.

A lender sends it with an answer: the first bytes of the hash of each block that can be found. Hashes form a chain that
begins with the salt of the tenant. Who has such a digest still has to ask with the tokens; it only says whom it is
useless to ask.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

HASH_BYTES = 4  # of each hash: two blocks of a cache seldom have them in common, and that costs one question
MOST_BLOCKS = 1 << 15  # of a digest; an engine that has more cached is always asked
FRESH_S = 0.5  # how old a digest may be: what was computed elsewhere since then is computed again


class Digest(NamedTuple):
    """`at`: when the answer with it came, in seconds of the asking engine's event loop."""

    at: float
    block_size: int
    blocks: frozenset[bytes]

    def is_fresh(self, now: float) -> bool:
        return now - self.at < FRESH_S

    def has(self, block: Hashable, block_size: int) -> bool:
        """Whether the block with this hash may be cached there. Blocks of other sizes have other hashes."""
        return block_size != self.block_size or not isinstance(block, bytes) or block[:HASH_BYTES] in self.blocks


def digest_bytes(hashes: Iterable[Hashable]) -> bytes:
    """As it is sent: the beginnings of these hashes, one after the other."""
    return b"".join(each[:HASH_BYTES] for each in hashes if isinstance(each, bytes))


def digest_of(sent: bytes, block_size: int, at: float) -> Digest:
    pieces = range(0, len(sent), HASH_BYTES)
    return Digest(at, block_size, frozenset(sent[piece : piece + HASH_BYTES] for piece in pieces))
