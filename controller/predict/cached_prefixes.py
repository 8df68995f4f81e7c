"""How much of a prompt an instance finds in its prefix cache, by tenant and class, learned from its own counters.

Engines count prompt tokens and, of these, the ones that their prefix cache had, but not of which requests they were.
Requests of one tenant and class tend to share a prefix, so each such kind has a share of its own: an interval between
two reports gives one equation, tokens of each kind times its share = cached tokens, and the shares follow by the
normalised least mean squares rule (Widrow and Hoff 1960; Nagumo and Noda 1967). Cost: O(kinds of the interval).
"""

from __future__ import annotations

from collections.abc import Mapping

Kind = tuple[str, str]  # tenant and class
STEP = 0.3  # how far one interval moves the shares: some three intervals count
MOST = 0.95  # of a prompt; an engine always computes its last block


class CachedShares:
    """`cached(kind, tokens)`: prompt tokens that need no prefill; 0 for a kind that was never seen."""

    __slots__ = ("_shares",)

    def __init__(self) -> None:
        self._shares: dict[Kind, float] = {}

    def __bool__(self) -> bool:
        """Was anything found in the prefix cache yet?"""
        return bool(self._shares)

    def cached(self, kind: Kind, tokens: int) -> int:
        return int(tokens * self._shares.get(kind, 0.0))

    def observe(self, prompts: Mapping[Kind, int], cached: float) -> None:
        """One interval: prompt tokens by kind, and how many of them all were cached."""
        if not cached and not self._shares:
            return  # an engine without a prefix cache costs nothing
        squares = sum(tokens * tokens for tokens in prompts.values())
        if not squares:
            return
        wrong = cached - sum(tokens * self._shares.get(kind, 0.0) for kind, tokens in prompts.items())
        for kind, tokens in prompts.items():
            share = self._shares.get(kind, 0.0) + STEP * wrong * tokens / squares
            self._shares[kind] = min(MOST, max(0.0, share))
