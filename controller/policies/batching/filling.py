"""Fills a step's prefill tokens in a policy's own order. Shared by the policies that rank prompts themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from controller.core.steps import Seq
from controller.policies.batching.base import EngineView, Grant


class Prompting(NamedTuple):
    """A sequence with `needed` tokens of prefill left (without cached ones). `queued`: it is not admitted yet."""

    seq: Seq
    needed: int
    queued: bool


class TokenEach:
    """One-token grants for decoding sequences, made once per sequence and reused in every step.

    Where a hundred sequences decode, making these grants takes half of the policy's time.
    """

    def __init__(self) -> None:
        self._decodes: Sequence[Seq] = []
        self._grants: list[Grant] = []

    def of(self, decodes: Sequence[Seq]) -> list[Grant]:
        """Grants in the given order. The list is kept and must not be changed."""
        if decodes != self._decodes:
            known = {grant.seq: grant for grant in self._grants}
            self._grants = [known.get(seq) or Grant(seq, 1) for seq in decodes]
            self._decodes = decodes
        return self._grants


def prompts(engine: EngineView) -> Iterator[Prompting]:
    """Admitted prompts first, then queued ones, each group in the engine's order."""
    for seq in engine.running:
        if not seq.decoding:
            yield Prompting(seq, seq.remaining, False)
    yield from queued(engine)


def queued(engine: EngineView) -> Iterator[Prompting]:
    """Only those that are not admitted yet."""
    for seq in engine.waiting():
        yield Prompting(seq, engine.uncached(seq), True)


def fill(engine: EngineView, ordered: Iterable[Prompting], budget: int) -> list[Grant]:
    """Grants in the given order until the budget is used up, the last one cut to fit; queued ones only while there are
    slots.
    """
    grants: list[Grant] = []
    room = engine.max_num_seqs - len(engine.running)
    for seq, needed, queued in ordered:
        if budget <= 0:
            break
        if queued:
            if room <= 0:
                continue
            room -= 1
        tokens = min(needed, budget)
        grants.append(Grant(seq, tokens))
        budget -= tokens
    return grants


def grant(engine: EngineView, seated: Sequence[Seq], queued: Sequence[Seq]) -> list[Grant]:
    """The step of a chosen batch: one token for each decode, then started prefills, then queued ones, within the
    budget.
    """
    budget = engine.token_budget
    grants: list[Grant] = []
    begun = []
    for seq in seated:
        if not seq.decoding:
            begun.append((seq, seq.remaining))
        elif budget > 0:
            grants.append(Grant(seq, 1))
            budget -= 1
    for seq, needed in chain(begun, ((seq, engine.uncached(seq)) for seq in queued)):
        if budget <= 0:
            break
        tokens = min(needed, budget)
        grants.append(Grant(seq, tokens))
        budget -= tokens
    return grants
