"""Random numbers that are fixed by a name: noise for experiments, without a generator whose state must be kept."""

from __future__ import annotations

import math
from hashlib import blake2b


def standard_normal(name: str, seed: int) -> float:
    """The same number for the same name and seed, standard normal over names (Box-Muller)."""
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    first, second = (int.from_bytes(part, "big") for part in (digest[:8], digest[8:]))
    radius = math.sqrt(-2.0 * math.log((first + 1) / (2**64 + 1)))
    return radius * math.cos(2.0 * math.pi * second / 2**64)
