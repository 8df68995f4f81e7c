"""Leaps: many equal decode steps as one event, for simulators. The results are the same as of single steps.

The blocks that single steps would take one by one are taken at the end of the leap; `repeats` never allows more steps
than there are free blocks for.
"""

from __future__ import annotations

from controller.core.steps import Seq, SeqState, Step
from controller.engine.blocks import BlockManager
from controller.engine.config import EngineConfig
from controller.engine.errors import ProtocolError


def repeats(step: Step, blocks: BlockManager, config: EngineConfig) -> int:
    """How often a step of decodes alone repeats unchanged: until the first sequence ends or blocks may run out."""
    longest = config.max_model_len
    lefts = [min(seq.max_tokens, longest - seq.prompt_tokens) - seq.output_tokens for seq in step.decodes]
    until_end = min(lefts)
    with_blocks = 1 + blocks.free // len(step.decodes) * config.block_size
    return max(1, min(until_end, with_blocks))


def decode(step: Step, times: int, now: float, blocks: BlockManager, config: EngineConfig) -> tuple[int, list[Seq]]:
    """Give `times` tokens to each decode that still runs. Returns all tokens generated and the sequences that ended."""
    # A simulation spends most of its time in this loop: nothing is called that need not be.
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
