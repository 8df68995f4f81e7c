"""Attention over the paged cache, and rotary positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from workers.engine.torch.batch import ForwardPass
from workers.engine.torch.config import ModelConfig, Rope


def inverse_frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """(dim / 2,) float32 radians a token."""
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not rope.factor:
        return plain
    wavelength = 2 * math.pi / plain
    blend = ((rope.original / wavelength - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


class Rotary:
    """Cosines and sines of the positions of a pass, computed in float32."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)

    def turn_of(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors (tokens, 1, head_dim)."""
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` is (tokens, heads, head_dim); halves are paired, as Hugging Face checkpoints have them."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(p: ForwardPass, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write the pass' keys and values into their slots, then attend; (tokens, heads * head_dim)."""
    keys[p.slots], values[p.slots] = p.key, p.value
    out = torch.empty_like(p.query)
    for prefill in p.prefills:
        rows, context = prefill.rows, prefill.context
        k, v = (p.key[rows], p.value[rows]) if context is None else (keys[context], values[context])
        q, k, v = (x.transpose(0, 1)[None] for x in (p.query[rows], k, v))
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=prefill.mask, is_causal=prefill.mask is None, enable_gqa=True
        )
        out[rows] = attended[0].transpose(0, 1)
    if p.decode_rows is not None:
        q = p.query[p.decode_rows]
        k, v = keys[p.decode_context].transpose(1, 2), values[p.decode_context].transpose(1, 2)
        # The heads of one query are the rows of their group: nothing is repeated, as enable_gqa may with a mask.
        grouped = q.unflatten(1, (k.shape[1], -1))
        out[p.decode_rows] = F.scaled_dot_product_attention(grouped, k, v, attn_mask=p.decode_mask).flatten(1, 2)
    return out.flatten(1)
