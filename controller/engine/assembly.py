"""A step from what was planned: chunks of prefill and single tokens of decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.core.steps import Chunk, Seq, SeqState, Step


def decodes_alone(step_id: int, grants: Sequence[tuple[Seq, int]], block_size: int) -> Step | None:
    """The step of `grants` if they are decodes of sequences that run and have their blocks: nearly always, where many
    decode. None: compose it one by one. A simulation spends its time here."""
    if not grants or not grants[-1][0].decoding:
        return None
    context, running = 0, SeqState.RUNNING
    for seq, _ in grants:
        computed, output = seq.computed, seq.output_tokens
        if (
            not output
            or seq.prompt_tokens + output - computed != 1
            or computed >= len(seq.blocks) * block_size
            or seq.state is not running
            or seq.scheduled_at is None
        ):
            return None
        context += computed + 1
    return Step(step_id, (), tuple([seq for seq, _ in grants]), context)


def assemble(step_id: int, planned: Mapping[Seq, int], now: float) -> Step:
    """`planned`: tokens by sequence, in order. Marks when a sequence first ran."""
    chunks: list[Chunk] = []
    decodes: list[Seq] = []
    context = 0
    for seq, tokens in planned.items():
        if seq.scheduled_at is None:
            seq.scheduled_at = now
        if seq.output_tokens and seq.prompt_tokens + seq.output_tokens - seq.computed == 1:  # seq.decoding
            decodes.append(seq)
            context += seq.computed + 1
        else:
            chunks.append(Chunk(seq, seq.computed, tokens, tokens == seq.remaining))
    return Step(step_id, tuple(chunks), tuple(decodes), context)
