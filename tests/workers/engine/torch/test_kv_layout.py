"""KV of real models is taken by the same model only: other numbers, other sizes and other weights are refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.workers.engine.client import COMPLETIONS, complete, post, samples
from tests.workers.engine.torch.bench import CPU, VOCABULARY, folder, program
from workers.engine.kv.store import Layout
from workers.engine.torch.kv.layout import TorchKv
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.task import OperatorProgram
from workers.engine.torch.weights.transfer import WeightMemory

pytestmark = pytest.mark.torch
PROMPT = [(7 * i) % VOCABULARY for i in range(100)]


def layout(made: OperatorProgram) -> Layout:
    return TorchKv(made.cache, made.model).layout


def differ(one: Layout, other: Layout) -> set[str]:
    return {name for name, value in one._asdict().items() if other._asdict()[name] != value}


def test_it_says_what_entries_are_made_of() -> None:
    made = program(folder())
    dtype, kv_heads, head_dim, vocabulary = layout(made)[2:6]
    assert (dtype, kv_heads, head_dim, vocabulary) == ("float32", 4, 8, VOCABULARY)


def test_numbers_of_the_same_size_are_not_the_same_numbers() -> None:
    made = program(folder())
    half, brain = (KVCache(made.model.config, 4, 4, CPU, dtype) for dtype in (torch.float16, torch.bfloat16))
    assert TorchKv(half).token_bytes == TorchKv(brain).token_bytes
    assert differ(TorchKv(half).layout, TorchKv(brain).layout) == {"dtype"}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--kv-heads", "2", "--head-dim", "16"), {"kv_heads", "head_dim", "model"}),
        (("--rope-factor", "8"), {"model"}),
        (("--seed", "1"), {"model"}),
    ],
)
def test_other_models_of_as_many_bytes_are_told_apart(options: tuple[str, ...], names: set[str]) -> None:
    one, other = layout(program(folder())), layout(program(folder("LlamaForCausalLM", *options)))
    assert one.token_bytes == other.token_bytes
    assert differ(one, other) == names


def test_a_copy_is_the_same_model_whatever_else_its_files_say(tmp_path: Path) -> None:
    shutil.copytree(folder(), tmp_path / "copy")
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 256'))
    assert config.read_text() != (folder() / "config.json").read_text()
    (tmp_path / "copy" / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert layout(program(tmp_path / "copy")) == layout(program(folder()))


@pytest.mark.parametrize("name", ["self_attn.v_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"])
def test_a_fine_tune_of_one_kind_of_tensor_is_another_model(name: str) -> None:
    made = program(folder())
    before = layout(made)
    tuned = [slot.memory for known, slot in made.model.slots().items() if known.endswith(name)]
    assert len(tuned) == 2
    for memory in tuned:
        memory.add_(0.001)
    assert differ(before, layout(made)) == {"model"}


def test_weights_that_come_later_are_what_counts() -> None:
    made = program(folder())
    store, wanted = TorchKv(made.cache, made.model), layout(made)
    weights = WeightMemory(made.model.slots(), present=True)
    weights.release()
    assert store.layout.model == ""
    weights.load_disk(folder("LlamaForCausalLM", "--seed", "1"))
    assert differ(store.layout, wanted) == {"model"}
    weights.load_disk(folder())
    assert store.layout == wanted
    weights.release()
    assert store.layout == wanted, "KV that is kept is of them"


# ---- through engines ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    common = ("--executor", "torch", "--model", str(folder()), "--threads", "1", "--kv-cache-gib", "0.01")
    options = (*common, "--profile", "constant:5ms", "--shutdown-timeout", "0")
    return {
        "prefill": (*options, "--role", "prefill", "--dtype", "bfloat16"),
        "decode": (*options, "--role", "decode", "--dtype", "float16"),
    }


async def test_a_decode_engine_takes_no_kv_of_other_numbers_and_caches_nothing_of_it(
    sessions: dict[str, aiohttp.ClientSession],
) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "ignore_eos": True, "temperature": 0}
    first = await complete(sessions["prefill"], **body, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    asked = {**body, "max_tokens": 4, "kv_transfer_params": first["kv_transfer_params"]}
    status, said = await post(sessions["decode"], COMPLETIONS, asked)
    assert (status, said["error"]["kv"]["reason"], said["error"]["kv"]["bytes"]) == (502, "other_model", 0)
    assert "dtype 'bfloat16' instead of 'float16'" in said["error"]["message"]
    assert (await samples(sessions["decode"]))["vllm:kv_cache_usage_perc", ""] == 0
    whole = await complete(sessions["decode"], **body, max_tokens=4)
    assert whole["usage"]["completion_tokens"] == 4, "it lives"
    assert (await samples(sessions["decode"]))["vllm:prefix_cache_hits_total", ""] == 0
