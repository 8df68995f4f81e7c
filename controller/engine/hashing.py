"""Chained block hashes: a block's hash stands for all tokens up to its end, so equal hashes mean equal prefixes.

BLAKE2b with 16 bytes makes a wrong hit impossible in practice, also for prompts made on purpose; a tenant's salt is the
start of the chain, so that no prefix is shared across salts.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from controller.core.steps import Seq


def extend_hashes(seq: Seq, block_size: int, tokens: int) -> None:
    """Make `seq.block_hashes` cover every full block among the first `tokens` tokens, as far as ids are known."""
    if seq.token_ids is None:
        return
    hashes = seq.block_hashes
    for index in range(len(hashes), tokens // block_size):
        parent = hashes[-1] if hashes else blake2b(seq.salt, digest_size=16).digest()
        content = array("q", seq.token_ids[index * block_size : (index + 1) * block_size]).tobytes()
        hashes.append(blake2b(parent + content, digest_size=16).digest())  # type: ignore[operator]
