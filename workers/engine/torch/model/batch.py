"""Turns a scheduler's step into segments of sequences, and these into the tensors of one forward pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from controller.core.steps import Seq, Step
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.model.sampling import Draw


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `start + len(tokens)` of a sequence. They are copied, since another thread owns the sequence.

    `draw`: how to sample after the last token; None: nothing is sampled.
    """

    seq: Seq
    tokens: Sequence[int]
    start: int
    blocks: list[int]
    draw: Draw | None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def segments_of(step: Step, eos: tuple[int, ...] = ()) -> list[Segment]:
    """The segments of a step. `eos` and a sequence's own stop tokens are not sampled before its `min_tokens`. Raises
    ValueError for a sequence without token ids."""
    found = [_segment(chunk.seq, chunk.start, chunk.length, chunk.last, eos) for chunk in step.chunks]
    return found + [_segment(seq, seq.computed, 1, True, eos) for seq in step.decodes]


def _segment(seq: Seq, start: int, length: int, last: bool, eos: tuple[int, ...]) -> Segment:
    if seq.token_ids is None:
        raise ValueError(f"sequence {seq.id!r} has no token ids")
    tokens = array("q", seq.token_ids[start : start + length])
    banned = (*eos, *seq.stop_tokens) if seq.output_tokens < seq.min_tokens else ()
    draw = Draw(seq.sampling, seq.seed, seq.output_tokens, banned) if last else None
    return Segment(seq, tokens, start, list(seq.blocks), draw)


@dataclass(slots=True)
class PrefillRows:
    """The rows of a pass that belong to one prompt. `context`: KV slots of all its tokens so far; None: it has no
    others than these rows."""

    rows: slice
    context: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(slots=True)
class ForwardPass:
    """The inputs of one pass, and its intermediate results between operators: all that a suspended step must keep."""

    segments: list[Segment]
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sampled_rows: torch.Tensor  # of those segments that have a draw
    prefills: list[PrefillRows]
    decode_rows: torch.Tensor | None  # (decodes,)
    decode_context: torch.Tensor | None  # (decodes, longest context) slots
    decode_mask: torch.Tensor | None  # (decodes, 1, 1, longest context)
    cos: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    sin: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    normed: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    query: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    key: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    value: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    attended: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    activated: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    weights: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # of the chosen experts
    chosen: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def build(segments: list[Segment], cache: KVCache, device: torch.device) -> ForwardPass:
    """The tensors of a pass. Single tokens attend together, padded to the longest context; prompts attend one by
    one."""
    tokens, positions, slots, sampled = array("q"), [], [], []
    prefills: list[PrefillRows] = []
    singles: list[tuple[int, torch.Tensor]] = []
    for segment in segments:
        first, context = len(tokens), cache.slots(segment.blocks, 0, segment.end)
        tokens.extend(segment.tokens)
        positions.append(torch.arange(segment.start, segment.end))
        slots.append(context[segment.start :])
        if len(segment.tokens) == 1:
            singles.append((first, context))
        else:
            prefills.append(_prefill(slice(first, len(tokens)), segment.start, context, device))
        if segment.draw is not None:
            sampled.append(len(tokens) - 1)
    rows, padded, mask = _decodes(singles, device) if singles else (None, None, None)
    return ForwardPass(
        segments,
        torch.tensor(tokens, device=device),
        torch.cat(positions).to(device),
        torch.cat(slots).to(device),
        torch.tensor(sampled, dtype=torch.long, device=device),
        *(prefills, rows, padded, mask),
    )


def _prefill(rows: slice, start: int, context: torch.Tensor, device: torch.device) -> PrefillRows:
    if start == 0:
        return PrefillRows(rows, None, None)
    return PrefillRows(rows, context.to(device), causal(rows.stop - rows.start, start, device))


def causal(length: int, start: int, device: torch.device) -> torch.Tensor:
    """The causal mask of `length` tokens after `start` others. On a CUDA device it is symbolic, since kernels that do
    not materialise all attention scores accept no materialised mask."""
    if device.type == "cuda":
        # It imports PyTorch's compiler, which takes as long as all of PyTorch before.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(length, start + length)
    return torch.ones(length, start + length, dtype=torch.bool, device=device).tril(start)


def _decodes(
    singles: list[tuple[int, torch.Tensor]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(context) for _, context in singles])
    padded = torch.nn.utils.rnn.pad_sequence([context for _, context in singles], batch_first=True)
    mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
    # A masked NaN or infinity still makes the whole row NaN. So rows are padded with a slot of their own sequence,
    # never with one of another request.
    padded = torch.where(mask, padded, padded[:, :1])
    rows = torch.tensor([row for row, _ in singles])
    return rows.to(device), padded.to(device), mask[:, None, None].to(device)
