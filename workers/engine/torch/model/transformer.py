"""A decoder-only transformer as a list of operators, so that a pass can be suspended between any two of them.

The operators are FlowPrefill's (section 5.1): qkv_proj, attn, o_proj, gate_up_proj, down_proj for each layer. In a
mixture of experts, gate and experts replace the last two. Norms, residuals and activations belong to the operator they
feed or follow. A ForwardPass carries the results from one operator to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from controller.core.errors import ConfigError
from workers.engine.model_config import Rope, TransformerConfig
from workers.engine.torch.model.batch import ForwardPass
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.ranks import Alone, Ranks
from workers.engine.torch.weights.files import Slot


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

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
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
        # Query heads become rows of their KV group, so no key is repeated, which enable_gqa may do with a mask.
        grouped = q.unflatten(1, (k.shape[1], -1))
        out[p.decode_rows] = F.scaled_dot_product_attention(grouped, k, v, attn_mask=p.decode_mask).flatten(1, 2)
    return out.flatten(1)


Operator = Callable[[ForwardPass], None]
New = Callable[..., torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm in float32, which checkpoints in half precision expect."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen": ("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
}


class Attention:
    """The operators qkv_proj, attn and o_proj of a layer. Names of `slots` are relative to `model.layers.N.`."""

    def __init__(self, config: TransformerConfig, ranks: Ranks, new: New) -> None:
        self._config, self._ranks = config, ranks
        self._heads, self._kv_heads = config.heads // ranks.world, config.kv_heads // ranks.world
        dim, hidden = config.head_dim, config.hidden_size
        rows = (self._heads + 2 * self._kv_heads) * dim
        self._norm = new(hidden)
        self._qkv, self._o = new(rows, hidden), new(hidden, self._heads * dim)
        self._qkv_bias = new(rows) if config.qkv_bias else None
        self._o_bias = new(hidden) if config.o_bias else None
        self._q_norm = new(dim) if config.qk_norm else None
        self._k_norm = new(dim) if config.qk_norm else None
        self._sizes = [self._heads * dim, self._kv_heads * dim, self._kv_heads * dim]

    def slots(self) -> dict[str, Slot]:
        config, world = self._config, self._ranks.world
        found = {"input_layernorm.weight": Slot(self._norm, tuple(self._norm.shape))}
        for name, memory in zip("qkv", self._qkv.split(self._sizes), strict=True):
            shape = (memory.shape[0] * world, config.hidden_size)
            found[f"self_attn.{name}_proj.weight"] = Slot(memory, shape, (_share(shape[0], self._ranks),))
        if self._qkv_bias is not None:
            for name, memory in zip("qkv", self._qkv_bias.split(self._sizes), strict=True):
                whole = memory.shape[0] * world
                found[f"self_attn.{name}_proj.bias"] = Slot(memory, (whole,), (_share(whole, self._ranks),))
        width = config.heads * config.head_dim
        columns = (slice(None), _share(width, self._ranks))
        found["self_attn.o_proj.weight"] = Slot(self._o, (config.hidden_size, width), columns)
        for name, whole in (
            ("o_proj.bias", self._o_bias),
            ("q_norm.weight", self._q_norm),
            ("k_norm.weight", self._k_norm),
        ):
            if whole is not None:
                found[f"self_attn.{name}"] = Slot(whole, tuple(whole.shape))
        return found

    def qkv_proj(self, p: ForwardPass) -> None:
        normed = rms_norm(p.hidden, self._norm, self._config.norm_eps)
        q, k, v = F.linear(normed, self._qkv, self._qkv_bias).split(self._sizes, dim=-1)
        dim, eps = self._config.head_dim, self._config.norm_eps
        q, k, p.value = q.unflatten(-1, (-1, dim)), k.unflatten(-1, (-1, dim)), v.unflatten(-1, (-1, dim))
        if self._q_norm is not None and self._k_norm is not None:
            q, k = rms_norm(q, self._q_norm, eps), rms_norm(k, self._k_norm, eps)
        p.query, p.key = rotate(q, p.cos, p.sin), rotate(k, p.cos, p.sin)

    def attn(self, p: ForwardPass, cache: KVCache, layer: int) -> None:
        p.attended = attend(p, cache.keys[layer], cache.values[layer])

    def o_proj(self, p: ForwardPass) -> None:
        out = self._ranks.sum(F.linear(p.attended, self._o))
        p.hidden = p.hidden + (out if self._o_bias is None else out + self._o_bias)


class FeedForward:
    """The operators gate_up_proj and down_proj of a layer."""

    def __init__(self, config: TransformerConfig, ranks: Ranks, new: New) -> None:
        self._config, self._ranks = config, ranks
        width = config.intermediate_size // ranks.world
        self._norm = new(config.hidden_size)
        self._gate_up, self._down = new(2 * width, config.hidden_size), new(config.hidden_size, width)

    def slots(self) -> dict[str, Slot]:
        hidden, width = self._config.hidden_size, self._config.intermediate_size
        share = _share(width, self._ranks)
        gate, up = self._gate_up.chunk(2)
        return {
            "post_attention_layernorm.weight": Slot(self._norm, (hidden,)),
            "mlp.gate_proj.weight": Slot(gate, (width, hidden), (share,)),
            "mlp.up_proj.weight": Slot(up, (width, hidden), (share,)),
            "mlp.down_proj.weight": Slot(self._down, (hidden, width), (slice(None), share)),
        }

    @property
    def operators(self) -> list[tuple[str, Operator]]:
        return [("gate_up_proj", self.gate_up_proj), ("down_proj", self.down_proj)]

    def gate_up_proj(self, p: ForwardPass) -> None:
        normed = rms_norm(p.hidden, self._norm, self._config.norm_eps)
        gate, up = F.linear(normed, self._gate_up).chunk(2, dim=-1)
        p.activated = F.silu(gate) * up

    def down_proj(self, p: ForwardPass) -> None:
        p.hidden = p.hidden + self._ranks.sum(F.linear(p.activated, self._down))


class MixtureOfExperts:
    """The operators gate and experts of a layer. Each rank has a part of every expert."""

    def __init__(self, config: TransformerConfig, ranks: Ranks, new: New) -> None:
        assert config.experts is not None
        self._config, self._ranks, self._experts = config, ranks, config.experts
        count, width, hidden = config.experts.count, config.experts.size // ranks.world, config.hidden_size
        self._norm, self._router = new(hidden), new(count, hidden)
        self._gate_up, self._down = new(count, 2 * width, hidden), new(count, hidden, width)

    def slots(self) -> dict[str, Slot]:
        hidden, width = self._config.hidden_size, self._experts.size
        router, experts, gate, up, down = EXPERT_NAMES[self._experts.layout]
        share = _share(width, self._ranks)
        found = {
            "post_attention_layernorm.weight": Slot(self._norm, (hidden,)),
            f"{router}.weight": Slot(self._router, tuple(self._router.shape)),
        }
        for index in range(self._experts.count):
            memory = dict(zip((gate, up), self._gate_up[index].chunk(2), strict=True))
            for name, view in memory.items():
                found[f"{experts}.{index}.{name}.weight"] = Slot(view, (width, hidden), (share,))
            found[f"{experts}.{index}.{down}.weight"] = Slot(self._down[index], (hidden, width), (slice(None), share))
        return found

    @property
    def operators(self) -> list[tuple[str, Operator]]:
        return [("gate", self.gate), ("experts", self.experts)]

    def gate(self, p: ForwardPass) -> None:
        p.normed = rms_norm(p.hidden, self._norm, self._config.norm_eps)
        odds = F.linear(p.normed, self._router).softmax(dim=-1, dtype=torch.float32)
        p.weights, p.chosen = odds.topk(self._experts.top, dim=-1)
        if self._experts.renormalise:
            p.weights = p.weights / p.weights.sum(dim=-1, keepdim=True)

    def experts(self, p: ForwardPass) -> None:
        out = torch.zeros_like(p.normed)
        for index in p.chosen.unique().tolist():
            rows, place = torch.where(p.chosen == index)
            gate, up = F.linear(p.normed[rows], self._gate_up[index]).chunk(2, dim=-1)
            done = F.linear(F.silu(gate) * up, self._down[index]) * p.weights[rows, place, None]
            out.index_add_(0, rows, done.to(out.dtype))
        p.hidden = p.hidden + self._ranks.sum(out)


class Model:
    """The memory of all weights, not filled yet (`slots`), and the operators that use it.

    Without `room` the memory of each layer is released as soon as its slots are known, so that a model whose weights
    come later briefly takes the memory of one layer at most. Code that fills it must allocate it first.
    """

    def __init__(
        self,
        config: TransformerConfig,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Ranks | None = None,
        *,
        room: bool = True,
    ) -> None:
        self.config, self.device, self.dtype, self.ranks = config, device, dtype, ranks or Alone()
        _check_shares(config, self.ranks.world)
        new = partial(torch.empty, device=device, dtype=dtype)
        feed_forward = MixtureOfExperts if config.experts else FeedForward
        self._room, self._slots = room, dict[str, Slot]()
        self._embedding = self._named("model.embed_tokens.weight", new(config.vocab_size, config.hidden_size))
        self._layers: list[tuple[Attention, FeedForward | MixtureOfExperts]] = []
        for index in range(config.layers):
            parts = Attention(config, self.ranks, new), feed_forward(config, self.ranks, new)
            for part in parts:
                self._name({f"model.layers.{index}.{name}": slot for name, slot in part.slots().items()})
            self._layers.append(parts)
        self._norm = self._named("model.norm.weight", new(config.hidden_size))
        self._head = self._embedding
        if not config.tied:
            self._head = self._named("lm_head.weight", new(config.vocab_size, config.hidden_size))
        self._rotary = Rotary(config, device)
        if not room and device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep the memory, which other engines of this device need

    def slots(self) -> dict[str, Slot]:
        """The slots by tensor name, as in Hugging Face checkpoints."""
        return dict(self._slots)

    def _named(self, name: str, memory: torch.Tensor) -> torch.Tensor:
        self._name({name: Slot(memory, tuple(memory.shape))})
        return memory

    def _name(self, slots: dict[str, Slot]) -> None:
        """Add slots. Called before their memory is released, since views of empty memory cannot be made."""
        self._slots.update(slots)
        if not self._room:
            for slot in slots.values():
                slot.memory.untyped_storage().resize_(0)

    def layers(self, cache: KVCache) -> list[list[tuple[str, Operator]]]:
        """The operators of each layer with their names, using this cache."""
        found: list[list[tuple[str, Operator]]] = []
        for layer, (attention, feed_forward) in enumerate(self._layers):
            attn = partial(attention.attn, cache=cache, layer=layer)
            operators: list[tuple[str, Operator]] = [("qkv_proj", attention.qkv_proj), ("attn", attn)]
            found.append([*operators, ("o_proj", attention.o_proj), *feed_forward.operators])
        return found

    def embed(self, p: ForwardPass) -> None:
        p.hidden = F.embedding(p.tokens, self._embedding)
        p.cos, p.sin = self._rotary.turn_of(p.positions, self.dtype)

    def lm_head(self, p: ForwardPass) -> None:
        """(rows, vocabulary) in float32, of the rows that are sampled from."""
        normed = rms_norm(p.hidden[p.sampled_rows], self._norm, self.config.norm_eps)
        p.logits = F.linear(normed, self._head).float()


def _share(size: int, ranks: Ranks) -> slice:
    each = size // ranks.world
    return slice(ranks.rank * each, (ranks.rank + 1) * each)


def _check_shares(config: TransformerConfig, world: int) -> None:
    width = config.experts.size if config.experts else config.intermediate_size
    for name, size in (("kv_heads", config.kv_heads), ("intermediate_size", width)):
        if size % world:
            raise ConfigError(f"{name}={size} cannot be split over {world} ranks", field="model")
