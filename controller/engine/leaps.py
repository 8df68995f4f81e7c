"""Leaps: many equal decode steps as one event, for drivers on virtual time. Results are those of single steps.

Blocks that single steps would take one after the other are taken at the leap's end; `repeats` never allows more steps
than there are blocks for.
"""

from __future__ import annotations

from controller.core.steps import Seq, SeqState, Step
from controller.engine.blocks import BlockManager
from controller.engine.config import EngineConfig
from controller.engine.errors import ProtocolError


def repeats(step: Step, blocks: BlockManager, config: EngineConfig) -> int:
    """How often a step of decodes alone runs unchanged: until the first sequence ends or blocks may run out."""
    longest = config.max_model_len
    lefts = [min(seq.max_tokens, longest - seq.prompt_tokens) - seq.output_tokens for seq in step.decodes]
    until_end = min(lefts)
    with_blocks = 1 + blocks.free // len(step.decodes) * config.block_size
    return max(1, min(until_end, with_blocks))


def decode(step: Step, times: int, now: float, blocks: BlockManager, config: EngineConfig) -> tuple[int, list[Seq]]:
    """`times` tokens for each decode that still runs; the tokens in all, and the sequences that came to their end.

    A simulation spends its time here: nothing is called that need not be.
    """
    size, longest, running = config.block_size, config.max_model_len, SeqState.RUNNING
    leaping, sealing = times > 1, blocks.caching
    generated, ended = 0, []
    for seq in step.decodes:
        if seq.state is not running:
            continue
        before = seq.computed
        computed = before + times
        if leaping and computed > len(seq.blocks) * size and not blocks.extend(seq, times):
            raise ProtocolError(f"{times} repeats of step {step.id} need more blocks than there are")
        seq.computed = computed
        if sealing and computed // size > before // size:
            blocks.seal(seq, before)
        output = seq.output_tokens + times
        seq.output_tokens = output
        seq.last_token_at = now
        generated += times
        if output >= seq.max_tokens or seq.prompt_tokens + output >= longest:
            ended.append(seq)
    return generated, ended
