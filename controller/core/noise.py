"""Random numbers that depend only on a name and a seed: noise for experiments without generator state to keep."""

from __future__ import annotations

import math
from hashlib import blake2b


def standard_normal(name: str, seed: int) -> float:
    """A standard normal number that is the same for the same name and seed (Box-Muller)."""
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    first, second = (int.from_bytes(part, "big") for part in (digest[:8], digest[8:]))
    radius = math.sqrt(-2.0 * math.log((first + 1) / (2**64 + 1)))
    return radius * math.cos(2.0 * math.pi * second / 2**64)
