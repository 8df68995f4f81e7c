"""A step from what was planned: chunks of prefill and single tokens of decodes."""

from __future__ import annotations

from collections.abc import Mapping

from controller.core.steps import Chunk, Seq, Step


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
