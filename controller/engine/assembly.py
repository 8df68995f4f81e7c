"""A step from what was planned: chunks of prefill and single tokens of decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from controller.core.steps import Chunk, Seq, SeqState, Step
from controller.engine.blocks import BlockManager


class Lead(NamedTuple):
    """Decodes that head the grants, with blocks for their next token; their lengths add up to `context`."""

    decodes: Sequence[Seq]
    context: int

    def still_running(self) -> Lead:
        """Without those that were evicted since."""
        decodes = [seq for seq in self.decodes if seq.state is SeqState.RUNNING]
        return Lead(decodes, sum(seq.tokens for seq in decodes))


NOBODY = Lead((), 0)


def lead(grants: Sequence[tuple[Seq, int]], blocks: BlockManager) -> Lead:
    """As many as run, have run before and find their blocks among those that are free: nearly always all decodes, as
    policies grant them first. What follows is composed one by one. A simulation spends its time here."""
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


def assemble(step_id: int, planned: Mapping[Seq, int], now: float, ahead: Lead = NOBODY) -> Step:
    """`planned`: tokens by sequence, in order, behind those of `ahead`. Marks when a sequence first ran."""
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
    return Step(step_id, tuple(chunks), tuple(decodes), context)
