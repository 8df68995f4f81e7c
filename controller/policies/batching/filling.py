"""Prefill tokens of a step in an order of the policy's own: shared by the policies that rank prompts themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from controller.core.steps import Seq, SeqState
from controller.policies.batching.base import EngineView, Grant


def prompts(engine: EngineView) -> Iterator[tuple[Seq, int]]:
    """Every sequence with prefill to do, admitted or queued, and the tokens it still needs (cached ones excluded)."""
    for seq in engine.running:
        if not seq.decoding:
            yield seq, seq.remaining
    for seq in engine.waiting():
        yield seq, engine.uncached(seq)


def fill(engine: EngineView, ordered: Iterable[tuple[Seq, int]], budget: int) -> list[Grant]:
    """Grants in the given order until the budget ends, the last one cut to fit; queued ones only while slots last."""
    grants: list[Grant] = []
    room = engine.max_num_seqs - len(engine.running)
    for seq, needed in ordered:
        if budget <= 0:
            break
        if seq.state is SeqState.WAITING:
            if room <= 0:
                continue
            room -= 1
        tokens = min(needed, budget)
        grants.append(Grant(seq, tokens))
        budget -= tokens
    return grants
