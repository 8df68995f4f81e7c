"""A model's shape, read from a folder in Hugging Face layout (config.json, generation_config.json).

Decoder-only transformers of the Llama family: rotary positions, RMS norms, grouped-query attention, gated SiLU, and in
its place a router and experts (Mixtral, Qwen3-MoE). What a config asks for beyond that is refused, never ignored: a
model served with one part missing answers fluently and wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from controller.core.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture's name implies and its config.json does not say."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Literal["", "mixtral", "qwen"] = ""


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "MixtralForCausalLM": Family(experts="mixtral"),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, experts="qwen"),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `factor` 0 is the plain kind; else Llama 3.1's, which stretches the long wavelengths:

    those above `original / low` tokens by `factor`, those below `original / high` not at all, smoothly in between.
    """

    theta: float
    factor: float = 0.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


@dataclass(frozen=True, slots=True)
class Experts:
    """`top` of `count` experts of width `size` for each token. `renormalise`: their weights add up to 1."""

    count: int
    top: int
    size: int
    renormalise: bool
    layout: Literal["mixtral", "qwen"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Lengths in elements. `eos`: token ids that end a sequence."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool
    dtype: str
    eos: frozenset[int]
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def read_config(folder: Path) -> ModelConfig:
    """Raises ConfigError naming the file and the key."""
    raw = _json(folder / "config.json")
    generation = folder / "generation_config.json"
    return parse_config(raw, _json(generation) if generation.is_file() else {})


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", field="model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected an object", field="model")
    return content


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    names = raw.get("architectures") or ["none"]
    if names[0] not in FAMILIES:
        raise _wrong("architectures", f"{names[0]} is not among {', '.join(FAMILIES)}")
    family = FAMILIES[names[0]]
    _refuse_unsupported(raw)
    hidden, heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    kv_heads = _count(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise _wrong("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads={heads}")
    head_dim = _count(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise _wrong("head_dim", f"rotary positions need an even number, got {head_dim}")
    bias = bool(raw.get("attention_bias", False))
    eos = (generation or {}).get("eos_token_id", raw.get("eos_token_id"))
    return ModelConfig(
        architecture=names[0],
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        layers=_count(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_count(raw, "max_position_embeddings", 2048),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        tied=bool(raw.get("tie_word_embeddings", False)),
        dtype=_dtype(raw),
        eos=frozenset([eos] if isinstance(eos, int) else eos or ()),
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias and not family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=_experts(raw, family) if family.experts else None,
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise _wrong("hidden_act", f"only silu is supported, got {raw['hidden_act']!r}")
    if raw.get("mlp_bias"):
        raise _wrong("mlp_bias", "biases in the feed-forward layers are not supported")
    if raw.get("quantization_config"):
        raise _wrong("quantization_config", "quantised weights are not supported")
    window, longest = raw.get("sliding_window"), raw.get("max_position_embeddings", 2048)
    if window and window < longest and raw.get("use_sliding_window", True):
        raise _wrong("sliding_window", f"attention windows ({window} of {longest} tokens) are not supported")


def _rope(raw: Mapping[str, Any]) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(found.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise _wrong("rope_parameters", f"rope_type {kind!r} is not supported; valid: default, llama3")
    try:
        return Rope(
            theta,
            float(found["factor"]),
            float(found["low_freq_factor"]),
            float(found["high_freq_factor"]),
            int(found["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise _wrong("rope_parameters", f"llama3 needs {error.args[0]}") from None


def _experts(raw: Mapping[str, Any], family: Family) -> Experts:
    if family.experts == "mixtral":
        count, size, renormalise = _count(raw, "num_local_experts"), _count(raw, "intermediate_size"), True
    else:
        count, size = _count(raw, "num_experts"), _count(raw, "moe_intermediate_size")
        renormalise = bool(raw.get("norm_topk_prob", False))
        if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
            raise _wrong("mlp_only_layers", "dense layers among sparse ones are not supported")
    top = _count(raw, "num_experts_per_tok")
    if top > count:
        raise _wrong("num_experts_per_tok", f"{top} of {count} experts")
    return Experts(count, top, size, renormalise, "mixtral" if family.experts == "mixtral" else "qwen")


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if name not in DTYPES:
        raise _wrong("dtype", f"{name!r} is not among {', '.join(DTYPES)}")
    return name


def _count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(name, f"expected a positive integer, got {value!r}")
    return value


def _wrong(name: str, message: str) -> ConfigError:
    return ConfigError(f"config.json: {name}: {message}", field="model")
