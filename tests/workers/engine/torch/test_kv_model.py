"""What of a model's config makes its KV another's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from workers.engine.model_config import Experts, Rope, TransformerConfig
from workers.engine.torch.kv.identity import non_default

pytestmark = pytest.mark.torch


@dataclasses.dataclass(frozen=True, slots=True)
class Later(TransformerConfig):
    """Of a version that knows a field more."""

    window: int = 0


def config(kind: type[TransformerConfig] = TransformerConfig, **more: Any) -> TransformerConfig:
    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 16, "layers": 2, "heads": 2, "kv_heads": 1}
    fixed: dict[str, Any] = {"head_dim": 4, "max_positions": 128, "norm_eps": 1e-5, "rope": Rope(1e4), "tied": False}
    return kind("LlamaForCausalLM", **{**sizes, **fixed, "dtype": "float32", "eos": frozenset({1}), **more})


def test_a_field_that_a_later_version_knows_changes_nothing_by_its_default() -> None:
    assert non_default(config(Later)) == non_default(config())
    assert non_default(config(Later, window=4)) != non_default(config())


@pytest.mark.parametrize(
    "changed",
    [{"layers": 3}, {"qkv_bias": True}, {"rope": Rope(5e5)}, {"rope": Rope(1e4, factor=8.0)},
     {"experts": Experts(4, 2, 8, True, "qwen")}],
)  # fmt: skip
def test_what_is_said_otherwise_is_another_model(changed: dict[str, Any]) -> None:
    assert non_default(config(**changed)) != non_default(config())
