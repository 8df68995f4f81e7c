"""Nonsense in config.json is refused by its key, before a model is made."""

import copy
import json
import shutil
import subprocess
import sys

import pytest

from controller.core.errors import ConfigError
from tests.workers.engine.test_model_config import LLAMA_8B
from workers.engine.model_config import parse_config

NAN, INF = float("nan"), float("inf")
LLAMA3 = LLAMA_8B["rope_scaling"]


def scaled(**change):
    return {**LLAMA3, **change}


NONSENSE = [
    *[("rms_norm_eps", value) for value in (NAN, INF, -1, 0, 10**400, "abc", None, [1], True)],
    *[("rope_theta", value) for value in (NAN, INF, 0, -5, 10**400, "x", None, False)],
    *[("rope_scaling", value) for value in ("x", [1], 7)],
    *[("factor", scaled(factor=value)) for value in (NAN, INF, 0, -8, "8", None, True)],
    *[("low_freq_factor", scaled(low_freq_factor=value)) for value in (NAN, 0, -1, "1")],
    *[("high_freq_factor", scaled(high_freq_factor=value)) for value in (NAN, INF, 1.0, 0.5, "4")],
    *[
        ("original_max_position_embeddings", scaled(original_max_position_embeddings=value))
        for value in (0, -1, NAN, 8192.5, "8192", True)
    ],
    ("rope_type", scaled(rope_type=None)),
    ("rope_type", scaled(rope_type=7)),
    *[("architectures", value) for value in (7, "LlamaForCausalLM", {"a": 1}, [7], [], None)],
    *[("eos_token_id", value) for value in ("x", -1, True, 1.5, [1, "x"], [True], [-1], {}, 10**9, [1, 10**9])],
    *[("tie_word_embeddings", value) for value in ("false", 1, [])],
    *[("attention_bias", value) for value in ("false", 0)],
    *[("mlp_bias", value) for value in ("false", 0)],
    *[("hidden_size", value) for value in (10**12, NAN, 4096.0, "4096", None)],
    *[("vocab_size", value) for value in (10**15, None)],
    *[("num_hidden_layers", value) for value in (10**9, 0)],
    *[("num_attention_heads", value) for value in (10**9, 0)],
    *[("head_dim", value) for value in (0, 7, 10**9, "x")],
    *[("max_position_embeddings", value) for value in (NAN, "9", 10**30)],
    *[("sliding_window", value) for value in ("x", NAN, -1, True, 4096)],
    ("hidden_act", None),
    ("hidden_act", 7),
    ("dtype", 7),
    ("quantization_config", {"bits": 4}),
]


@pytest.mark.parametrize(("name", "value"), NONSENSE, ids=[f"{name}-{value}"[:60] for name, value in NONSENSE])
def test_nonsense_is_refused_by_its_key(name, value):
    raw = copy.deepcopy(LLAMA_8B)
    raw["rope_scaling" if isinstance(value, dict) and "factor" in value else name] = value
    with pytest.raises(ConfigError, match=rf"config\.json: .*\b{name}\b") as caught:
        parse_config(raw)
    assert caught.value.field == "model"


@pytest.mark.parametrize("value", ["x", -1, True, 128_256])
def test_the_generation_config_is_looked_at_too(value):
    with pytest.raises(ConfigError, match="eos_token_id"):
        parse_config(LLAMA_8B, {"eos_token_id": value})


def test_what_a_published_config_leaves_open_stays_open():
    open_ = {"sliding_window": None, "head_dim": None, "eos_token_id": None, "quantization_config": None,
             "rope_scaling": None, "num_key_value_heads": None, "attention_bias": None}  # fmt: skip
    config = parse_config({**LLAMA_8B, **open_})
    assert (config.eos, config.kv_heads, config.head_dim) == (frozenset(), 32, 128)


# ---- whole engines --------------------------------------------------------------------------------------------------


def refused(path):
    """What an engine says that does not come up."""
    command = [sys.executable, "-m", "workers.engine", "--port", "0", "--executor", "torch", "--model", str(path)]
    options = ("--kv-cache-gib", "0.01", "--threads", "1", "--profile", "constant:5ms")
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "listening" not in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def changed(tmp_path, change):
    from tests.workers.engine.torch.bench import folder

    path = shutil.copytree(folder(), tmp_path / "model")
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, **change}))
    return path


@pytest.mark.torch
@pytest.mark.parametrize("change", [{"rms_norm_eps": NAN}, {"hidden_size": 10**12}, {"eos_token_id": "x"}])
def test_an_engine_with_nonsense_is_never_ready(tmp_path, change):
    assert f"config.json: {next(iter(change))}: " in refused(changed(tmp_path, change))


@pytest.mark.torch
def test_a_model_that_no_memory_holds_is_named(tmp_path):
    said = refused(changed(tmp_path, {"hidden_size": 1 << 22, "vocab_size": 1 << 22}))
    assert "hidden_size" in said
    assert "memory" in said
