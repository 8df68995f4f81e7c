"""Weights come only from an engine of the same checkpoint, whatever its names and shapes; and copies across devices."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.engine.client import complete, post
from tests.workers.engine.process import FLEET
from tests.workers.engine.torch.bench import folder, program
from tests.workers.engine.torch.meetings import HOST, TOKEN, memory
from tests.workers.engine.torch.test_digests import served
from workers.engine.config import parse
from workers.engine.server import _weight_store, with_model
from workers.engine.torch.weights import digest as torch_digest
from workers.engine.torch.weights import transfer as torch_transfer
from workers.engine.torch.weights.digest import WORDS, XXH3, algorithm_of
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.store import TorchWeights
from workers.engine.torch.weights.transfer import TensorInfo, WeightMemory
from workers.engine.weights.checkpoint_identity import marks_of
from workers.engine.weights.host_copy import HostCopy
from workers.engine.weights.manager import Identity, Source, WeightManager

pytestmark = [pytest.mark.torch, pytest.mark.long(25)]
COMMON = ("--executor", "torch", "--threads", "1", "--kv-cache-gib", "0.01", "--profile", "constant:5ms")
ASK: dict[str, Any] = {"prompt": list(range(40)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def tuned() -> Path:
    """Of the same names and shapes as `folder()`, and of other values."""
    return folder("LlamaForCausalLM", "--seed", "1")


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sequence[str]]:
    """Two fine-tunes under one name, as after a port was taken over; and an engine that has a copy of the folder."""
    copy = shutil.copytree(folder(), tmp_path_factory.mktemp("copied") / "model", copy_function=shutil.copyfile)

    def options(path: Path, *more: str, name: str = "tiny") -> tuple[str, ...]:
        return (*COMMON, "--model", str(path), "--served-model-name", name, "--shutdown-timeout", "0", *more)

    return {
        "wrong": options(tuned()),
        "right": options(folder()),
        "renamed": options(folder(), name="elsewhere"),
        "warm": options(copy, "--weights", "absent"),
    }


async def text(session: Any) -> str:
    return str((await complete(session, **ASK))["choices"][0]["text"])


async def load(session: Any, *sources: dict[str, str]) -> Any:
    await post(session, "/sleep?level=2", {"token": TOKEN})
    status, said = await post(session, "/weights/load", {**FLEET, "sources": list(sources)})
    assert (status, said["state"]) == (200, "present"), said
    return said


async def test_an_engine_of_another_checkpoint_is_no_source_and_the_next_one_is_tried(engines, sessions):
    right = await text(sessions["right"])
    assert await text(sessions["wrong"]) != right
    names = [{"kind": "engine", "url": engines[name].url} for name in ("wrong", "renamed")]
    said = await load(sessions["warm"], *names, {"kind": "disk"})
    wrong, renamed, disk = said["attempts"]
    assert "returned 409" in wrong["error"]
    held, wanted = (store(path, memory()).identity for path in (tuned(), folder()))
    assert f"this engine holds {held}, not {wanted}" in wrong["error"]
    assert str(held) != str(wanted)
    assert f"not {wanted}" in renamed["error"]
    assert "holds elsewhere" in renamed["error"]
    assert (disk["kind"], disk["error"]) == ("disk", "")
    assert await text(sessions["warm"]) == right
    assert (said["model"], said["checkpoint"]) == (wanted.model, wanted.checkpoint)


async def test_a_folder_that_was_copied_by_hand_is_the_same_checkpoint_and_what_came_is_given_on(engines, sessions):
    said = await load(sessions["warm"], {"kind": "engine", "url": engines["right"].url})
    assert [(each["kind"], each["error"]) for each in said["attempts"]] == [("engine", "")]
    said = await load(sessions["renamed"], {"kind": "disk"})
    assert said["checkpoint"]
    said = await load(sessions["right"], {"kind": "engine", "url": engines["warm"].url})
    assert [(each["kind"], each["error"]) for each in said["attempts"]] == [("engine", "")]
    assert await text(sessions["right"]) == await text(sessions["warm"])


# ---- what a store says that it holds --------------------------------------------------------------------------------


@pytest.fixture
def changing(tmp_path: Path) -> Callable[[], None]:
    """A checkpoint in `tmp_path / "model"`, and what writes another one over it."""
    path = shutil.copytree(folder(), tmp_path / "model")

    def change() -> None:
        tensors = {name: tensor + 1.0 for name, tensor in load_file(path / "model.safetensors").items()}
        save_file(tensors, path / "new")
        (path / "new").replace(path / "model.safetensors")

    return change


def store(path: Path, held: WeightMemory, shared: HostCopy | None = None) -> TorchWeights:
    """Of an engine that began to read just now."""
    return TorchWeights(held, path, HOST, TOKEN, 2.0, shared, model="tiny", marks=marks_of(path))


def of(path: Path) -> WeightMemory:
    return WeightMemory(program(path).model.slots(), present=True)


async def test_it_is_what_was_loaded_and_not_what_lies_on_the_disk_by_now(changing, tmp_path):
    path = tmp_path / "model"
    weights = store(path, of(path))
    first = weights.identity
    assert first == store(folder(), memory()).identity
    changing()
    assert weights.identity == first
    await weights.release(keep_host_copy=True)
    assert weights.identity == Identity("tiny")
    await weights.load(Source("host"))
    assert weights.identity == first, "its own copy is of before"
    await weights.release(keep_host_copy=False)
    await weights.load(Source("disk"))
    assert weights.identity == store(path, of(path)).identity != first


async def test_a_checkpoint_that_changes_while_it_is_read_is_no_source(changing, tmp_path, monkeypatch):
    path = tmp_path / "model"
    weights, read = store(path, of(path)), WeightMemory.load_disk
    await weights.release(keep_host_copy=False)

    def slow(self: WeightMemory, folder: Path) -> int:
        found = read(self, folder)
        changing()
        return found

    monkeypatch.setattr(WeightMemory, "load_disk", slow)
    await weights.load(Source("disk"))
    assert (weights.present, weights.identity) == (True, Identity("tiny"))


@pytest.mark.parametrize("change_at", ["after config.json was read", "after the weights were read"])
def test_a_checkpoint_that_is_replaced_while_an_engine_starts_is_no_source(changing, tmp_path, change_at):
    """Its start takes minutes: what lies in the folder afterwards is not what it has read."""
    options = ("--port", "0", "--model", str(tmp_path / "model"), "--served-model-name", "tiny", *COMMON)

    def started(changed: str = "") -> Identity:
        given = parse(list(options))
        if changed == "after config.json was read":
            changing()
        config = with_model(given)
        if changed == "after the weights were read":
            changing()
        engine: Any = SimpleNamespace(scheduler=SimpleNamespace(blocks=None))
        return _weight_store(config, engine, None).identity

    first = started()
    assert first.checkpoint
    assert started(change_at) == Identity("tiny")
    assert started().checkpoint not in ("", first.checkpoint)


# ---- an engine without files of its own -----------------------------------------------------------------------------


def without_files(tmp_path: Path) -> Path:
    path = shutil.copytree(folder(), tmp_path / "bare")
    for file in [*path.glob("*.safetensors"), *path.glob("*.index.json")]:
        file.unlink()
    return path


def warm(path: Path) -> WeightManager:
    made = WeightManager(store(path, memory(present=False)))
    made.store.memory.release()
    return made


async def test_an_engine_without_weights_of_its_own_takes_those_of_its_name_and_configuration(tmp_path):
    source, statuses = WeightManager(store(folder(), memory())), []
    taking, again = warm(without_files(tmp_path)), warm(folder())
    async with served(source, statuses.append) as url:
        assert await taking.load([Source("engine", url)]), taking.attempts
    assert taking.store.identity == source.store.identity, "which one it was is known from the source"
    assert taking.store.memory.manifest() == source.store.memory.manifest()
    async with served(taking, statuses.append) as url:
        assert await again.load([Source("engine", url)]), again.attempts
    assert set(statuses) <= {200, 202}


async def test_but_none_of_another_configuration_or_name_and_none_that_no_one_knows(tmp_path):
    bare, statuses = without_files(tmp_path), []
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))
    same = TorchWeights(memory(), folder(), HOST, TOKEN, 2.0, model="elsewhere", marks=marks_of(folder()))
    unknown = TorchWeights(memory(), folder(), HOST, TOKEN, 2.0, model="tiny")
    sources = [WeightManager(each) for each in (store(folder(), memory()), same, unknown)]
    for source in sources:
        async with served(source, statuses.append) as url:
            taking = warm(bare)
            assert not await taking.load([Source("engine", url)])
            assert "not tiny (checkpoint any with config.json " in taking.attempts[0].error
            (bare / "config.json").write_text(json.dumps(config))
    assert statuses == [409, 409, 409]


# ---- digests of the other kind of device ----------------------------------------------------------------------------


async def shared(weights: TorchWeights) -> None:
    async with asyncio.timeout(60):
        while weights.sending:
            await asyncio.sleep(0.01)
    assert weights.shared_copy


def as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch_digest, torch_transfer):
        monkeypatch.setattr(module, "native", lambda device: WORDS)


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_copy_that_an_engine_on_a_device_wrote_is_checked_and_digested_again(monkeypatch, tmp_path, damaged):
    with monkeypatch.context() as there:
        as_a_device(there)
        wrote = store(folder(), memory(), HostCopy(tmp_path, folder(), "float32"))
        await shared(wrote)
        assert {algorithm_of(info.digest) for info in wrote.memory.manifest()} == {WORDS}
    here = store(folder(), memory(present=False), HostCopy(tmp_path, folder(), "float32"))
    here.memory.release()
    if damaged:
        (file,) = tmp_path.glob("*/*/model.safetensors")
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        with pytest.raises(Exception, match=r"tensor \S+ of the copy in host memory is damaged"):
            await here.load(Source("host"))
        return
    await here.load(Source("host"))
    assert here.identity == wrote.identity
    assert here.memory.manifest() == memory().manifest(), "with digests of its own kind, for whom it sends to"
    assert torch.equal(here.memory._memory["lm_head.weight"], wrote.memory._memory["lm_head.weight"])


@pytest.mark.parametrize(
    ("made", "said"),
    [(f"{WORDS}:00", f"the source has {WORDS} digests, this engine has {XXH3}"), ("00", "not a digest")],
)
def test_digests_that_this_device_does_not_make_are_refused_before_anything_moves(made, said):
    held = memory()
    theirs = [TensorInfo(info.name, info.dtype, info.shape, made) for info in held.manifest()]
    with pytest.raises(WeightsError, match=said):
        held.check(theirs)
