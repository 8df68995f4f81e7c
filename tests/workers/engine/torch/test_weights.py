"""Damaged or foreign checkpoints: refused with the tensor's and the file's name, before a byte is loaded."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.engine.torch.bench import CPU, VOCABULARY, folder
from workers.engine.model_config import read_config
from workers.engine.torch.model.transformer import Model
from workers.engine.torch.weights.files import WeightsError, load_weights
from workers.engine.torch.weights.transfer import WeightMemory

pytestmark = pytest.mark.torch
NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def copy(tmp_path):
    """A copy of the model in one file."""
    return shutil.copytree(folder(), tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    return shutil.copytree(folder("LlamaForCausalLM", "--intermediate", "2000", "--shard-mb", "1"), tmp_path / "model")


def model_of(path):
    """With memory that nothing has been loaded into: all ones."""
    model = Model(read_config(path), CPU, torch.float32)
    for slot in model.slots().values():
        slot.memory.fill_(1.0)
    return model


def refused(path):
    """The error's text; nothing may have been written."""
    model = model_of(path)
    with pytest.raises(WeightsError) as caught:
        load_weights(model.slots(), path)
    assert all((slot.memory == 1.0).all() for slot in model.slots().values())
    return str(caught.value)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("fixture", ["copy", "sharded"])
def test_every_tensor_lands_where_its_name_says(fixture, request):
    path = request.getfixturevalue(fixture)
    files = sorted(path.glob("*.safetensors"))
    assert len(files) == 1 if fixture == "copy" else len(files) > 2
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    model = model_of(path)
    read = load_weights(model.slots(), path)
    assert read == sum(tensor.nbytes for tensor in stored.values())
    assert {name: slot.shape for name, slot in model.slots().items()} == {n: tuple(t.shape) for n, t in stored.items()}
    assert all(torch.equal(slot.memory, stored[name]) for name, slot in model.slots().items())


def test_two_slots_never_share_memory(copy):
    model = model_of(copy)
    for value, slot in enumerate(model.slots().values()):
        slot.memory.fill_(float(value))
    assert all((slot.memory == float(value)).all() for value, slot in enumerate(model.slots().values()))


def test_a_missing_tensor_is_named(copy):
    rewrite(copy, lambda tensors: tensors.pop(NAME))
    assert f"tensor {NAME} is missing from {copy}" in refused(copy)


def test_a_wrong_shape_is_named_with_both_shapes(copy):
    rewrite(copy, lambda tensors: tensors.update({NAME: torch.ones(3, 64)}))
    assert refused(copy) == (
        f"tensor {NAME} in {copy / 'model.safetensors'} has shape [3, 64], the model needs [32, 64]"
    )


def test_integers_are_no_weights(copy):
    rewrite(copy, lambda tensors: tensors.update({NAME: torch.ones(32, 64, dtype=torch.int32)}))
    assert f"tensor {NAME} in {copy / 'model.safetensors'} is I32" in refused(copy)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(copy, keep):
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    assert f"{file} is not a complete safetensors file" in refused(copy)


def test_one_truncated_shard_of_many_is_named(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} is not a complete safetensors file" in refused(sharded)


def test_text_is_no_safetensors_file(copy):
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "is not a complete safetensors file" in refused(copy)


def test_a_folder_without_weights(copy):
    (copy / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refused(copy)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index_is_named(sharded, content):
    index = sharded / "model.safetensors.index.json"
    index.write_text(content)
    assert f"{index}: no valid weight_map" in refused(sharded)


def test_an_index_that_names_the_wrong_shard(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    here = content["weight_map"][NAME]
    content["weight_map"][NAME] = next(file for file in files if file != here)
    index.write_text(json.dumps(content))
    assert f"tensor {NAME} is not in " in refused(sharded)


def test_a_shard_that_is_not_there(sharded):
    file = sorted(sharded.glob("*.safetensors"))[0]
    file.unlink()
    assert f"{file} is not a complete safetensors file" in refused(sharded)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_refused_by_name(copy, value, dtype):
    """One among many, in whatever type the file has."""

    def change(tensors):
        tensors[NAME] = tensors[NAME].to(dtype)
        tensors[NAME][3, 5] = value

    rewrite(copy, change)
    with pytest.raises(WeightsError, match=f"tensor {NAME} in .*model.safetensors has values that are not finite"):
        load_weights(model_of(copy).slots(), copy)


def test_what_the_models_type_cannot_hold_is_refused_and_large_values_are_not(copy):
    rewrite(copy, lambda tensors: tensors[NAME].fill_(60_000.0))  # their sum is beyond float16
    half = Model(read_config(copy), CPU, torch.float16)
    load_weights(half.slots(), copy)
    rewrite(copy, lambda tensors: tensors[NAME].fill_(70_000.0))
    load_weights(model_of(copy).slots(), copy)
    with pytest.raises(WeightsError, match=f"tensor {NAME} .*float16"):
        load_weights(half.slots(), copy)


def test_memory_with_no_numbers_is_never_present(copy):
    memory = WeightMemory(model_of(copy).slots(), present=False)
    rewrite(copy, lambda tensors: tensors[NAME].fill_(float("nan")))
    with pytest.raises(WeightsError, match=NAME):
        memory.load_disk(copy)
    assert not memory.present


def test_half_precision_is_widened(copy):
    tensors = load_file(copy / "model.safetensors")
    rewrite(copy, lambda found: found.update({name: tensor.bfloat16() for name, tensor in found.items()}))
    model = model_of(copy)
    load_weights(model.slots(), copy)
    embedding = model.slots()["model.embed_tokens.weight"].memory
    assert embedding.shape == (VOCABULARY, 64)
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"].bfloat16().float())
