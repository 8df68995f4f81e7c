"""A model's shape, read from a folder in Hugging Face layout (config.json, generation_config.json).

Decoder-only transformers of the Llama family: rotary positions, RMS norms, grouped-query attention, gated SiLU, or a
router and experts instead of the latter (Mixtral, Qwen3-MoE). Features beyond these are refused and never ignored,
since a model without one of its parts answers fluently and wrongly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from controller.core.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
MOST = 1 << 24  # of any size but the context; a larger one is an error in the file
MOST_POSITIONS = 1 << 31


@dataclass(frozen=True, slots=True)
class Family:
    """Properties that an architecture's name implies and its config.json does not contain."""

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
    """Rotary positions. `factor` 0: plain; otherwise Llama 3.1's kind, which stretches long wavelengths.

    Those above `original / low` tokens are stretched by `factor`, those below `original / high` not at all, with a
    smooth transition in between.
    """

    theta: float
    factor: float = 0.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: each token uses `top` of `count` experts of width `size`. `renormalise`: whether the
    weights of the chosen experts are scaled to a sum of 1."""

    count: int
    top: int
    size: int
    renormalise: bool
    layout: Literal["mixtral", "qwen"]


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """The shape of a model; sizes in elements. `eos`: token ids that end a sequence."""

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


def read_config(folder: Path) -> TransformerConfig:
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


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> TransformerConfig:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise _wrong("architectures", f"expected a list of names, got {names!r}")
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
    bias = _flag(raw, "attention_bias")
    return TransformerConfig(
        architecture=names[0],
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        layers=_count(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_positions(raw),
        norm_eps=_number(raw, "rms_norm_eps", 1e-6, most=1.0),
        rope=_rope(raw),
        tied=_flag(raw, "tie_word_embeddings"),
        dtype=_dtype(raw),
        eos=_eos((generation or {}).get("eos_token_id", raw.get("eos_token_id")), _count(raw, "vocab_size")),
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias and not family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=_experts(raw, family) if family.experts else None,
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise _wrong("hidden_act", f"only silu is supported, got {raw['hidden_act']!r}")
    if _flag(raw, "mlp_bias"):
        raise _wrong("mlp_bias", "biases in the feed-forward layers are not supported")
    if raw.get("quantization_config"):
        raise _wrong("quantization_config", "quantised weights are not supported")
    if not raw.get("sliding_window"):
        return
    window, longest = _count(raw, "sliding_window", most=MOST_POSITIONS), _positions(raw)
    if window < longest and _flag(raw, "use_sliding_window", default=True):
        raise _wrong("sliding_window", f"attention windows ({window} of {longest} tokens) are not supported")


def _positions(raw: Mapping[str, Any]) -> int:
    return _count(raw, "max_position_embeddings", 2048, MOST_POSITIONS)


def _eos(value: Any, vocab_size: int) -> frozenset[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
        raise _wrong("eos_token_id", f"expected token ids, got {value!r}")
    if ids and max(ids) >= vocab_size:
        raise _wrong("eos_token_id", f"{max(ids)} is beyond the vocabulary of {vocab_size}")
    return frozenset(ids)


def _rope(raw: Mapping[str, Any]) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    where = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    found = raw.get(where) or {}
    if not isinstance(found, dict):
        raise _wrong(where, f"expected an object, got {found!r}")
    theta = _number(found if "rope_theta" in found else raw, "rope_theta", 10_000.0)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise _wrong(where, f"rope_type {kind!r} is not supported; valid: default, llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [name for name in names if name not in found]:
        raise _wrong(where, f"llama3 needs {missing[0]}")
    low, high = _number(found, "low_freq_factor"), _number(found, "high_freq_factor")
    if low >= high:
        raise _wrong("high_freq_factor", f"{high:g} is not above low_freq_factor={low:g}")
    return Rope(theta, _number(found, "factor"), low, high, _count(found, names[3], most=MOST_POSITIONS))


def _experts(raw: Mapping[str, Any], family: Family) -> Experts:
    if family.experts == "mixtral":
        count, size, renormalise = _count(raw, "num_local_experts"), _count(raw, "intermediate_size"), True
    else:
        count, size = _count(raw, "num_experts"), _count(raw, "moe_intermediate_size")
        renormalise = _flag(raw, "norm_topk_prob")
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


def _count(raw: Mapping[str, Any], name: str, default: int | None = None, most: int = MOST) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _wrong(name, f"expected an integer from 1 to {most}, got {value!r}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float | None = None, most: float = sys.float_info.max) -> float:
    """A number above 0 and finite, since Python's JSON accepts NaN and Infinity."""
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise _wrong(name, f"expected a number above 0 and at most {most:g}, got {value!r}")
    return float(value)


def _flag(raw: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = raw.get(name)
    if value is None:  # published files contain null for values that are not set
        return default
    if not isinstance(value, bool):
        raise _wrong(name, f"expected true or false, got {value!r}")
    return value


def _wrong(name: str, message: str) -> ConfigError:
    return ConfigError(f"config.json: {name}: {message}", field="model")
