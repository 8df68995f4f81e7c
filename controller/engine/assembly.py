"""Builds a step from a plan: chunks of prefill and one token for each decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from controller.core.steps import NO_SWAPS, Chunk, Seq, SeqState, Step, Swaps
from controller.engine.blocks import BlockManager


class Lead(NamedTuple):
    """The decodes at the head of the grants. They have blocks for their next token; `context` is their total length."""

    decodes: Sequence[Seq]
    context: int

    def still_running(self) -> Lead:
        """Without those that have been evicted since."""
        decodes = [seq for seq in self.decodes if seq.state is SeqState.RUNNING]
        return Lead(decodes, sum(seq.tokens for seq in decodes))


NOBODY = Lead((), 0)


def lead(grants: Sequence[tuple[Seq, int]], blocks: BlockManager) -> Lead:
    """The longest run of decodes at the head of the grants that only need blocks that are free.

    Policies grant decodes first, so this is nearly always all of them; `assemble` takes the rest one by one.
    """
    # A simulation spends most of its time in this loop: read attributes once, call as little as possible.
    context, size, running = 0, blocks.block_size, SeqState.RUNNING
    decodes: list[Seq] = []
    take = decodes.append
    for seq, _ in grants:
        computed, output = seq.computed, seq.output_tokens
        if (
            not output
            or seq.prompt_tokens + output - computed != 1
            or seq.state is not running
            or seq.scheduled_at is None
            or (computed >= len(seq.blocks) * size and not blocks.extend(seq, 1))
        ):
            break
        context += computed + 1
        take(seq)
    return Lead(decodes, context)


def assemble(
    step_id: int,
    planned: Mapping[Seq, int],
    now: float,
    ahead: Lead = NOBODY,
    copies: tuple[tuple[int, int], ...] = (),
    swaps: Swaps = NO_SWAPS,
) -> Step:
    """`planned`: tokens by sequence, in order, after those of `ahead`. `copies`, `swaps`: as in the step.

    Also records when each sequence first ran.
    """
    chunks: list[Chunk] = []
    decodes, context = list(ahead.decodes), ahead.context
    for seq, tokens in planned.items():
        if seq.scheduled_at is None:
            seq.scheduled_at = now
        if seq.decoding:
            decodes.append(seq)
            context += seq.computed + 1
        else:
            chunks.append(Chunk(seq, seq.computed, tokens, tokens == seq.remaining))
    return Step(step_id, tuple(chunks), tuple(decodes), context, copies, swaps)
