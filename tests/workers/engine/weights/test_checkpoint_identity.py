"""Which weights a folder holds: the same for a copy of them, another one for a fine-tune of the same shapes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from workers.engine.weights.checkpoint_identity import (
    MOST_PLACES,
    PLACE_BYTES,
    CheckpointIdentity,
    UnreadableCheckpoint,
    identity_of,
    marks_of,
)

CONFIG = {"hidden_size": 8, "transformers_version": "5"}


def file(path: Path, tensors: dict[str, bytes], dtype: str = "F32") -> None:
    header: dict[str, object] = {"__metadata__": {"format": path.name}}
    at = 0
    for name, raw in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(raw) // 4], "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


TENSORS = {"a": bytes(range(256)) * 200, "b": b"\1" * 16, "c": b"\2" * 3 * PLACE_BYTES}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return made(tmp_path / "model", TENSORS)


def made(path: Path, tensors: dict[str, bytes]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    file(path / "model.safetensors", tensors)
    return path


def test_a_copy_by_hand_is_the_same_and_so_is_what_lies_in_other_files(checkpoint, tmp_path):
    was = identity_of(checkpoint)
    copy = shutil.copytree(checkpoint, tmp_path / "copy", copy_function=shutil.copyfile)
    (copy / "README.md").write_text("notes")
    (copy / "config.json").write_text(json.dumps({**CONFIG, "transformers_version": "6"}, indent=3))
    assert identity_of(copy) == was
    (copy / "model.safetensors").unlink()
    file(copy / "one.safetensors", {"c": TENSORS["c"]})
    file(copy / "two.safetensors", {"b": TENSORS["b"], "a": TENSORS["a"]})
    where = {"a": "two.safetensors", "b": "two.safetensors", "c": "one.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert identity_of(copy) == was


@pytest.mark.parametrize("name", list(TENSORS))
@pytest.mark.parametrize("at", ["begin", "middle", "end"])
def test_one_tensor_that_was_trained_further_is_another_checkpoint(checkpoint, tmp_path, name, at):
    raw = bytearray(TENSORS[name])
    raw[{"begin": 0, "middle": len(raw) // 2, "end": -1}[at]] ^= 1
    other = made(tmp_path / "tuned", {**TENSORS, name: bytes(raw)})
    assert (other / "model.safetensors").stat().st_size == (checkpoint / "model.safetensors").stat().st_size
    assert identity_of(other) != identity_of(checkpoint)


def test_values_that_change_places_between_tensors_show(tmp_path):
    one = made(tmp_path / "one", {"a": b"\1" * 16, "b": b"\2" * 16})
    other = made(tmp_path / "other", {"a": b"\2" * 16, "b": b"\1" * 16})
    assert identity_of(one) != identity_of(other)


def test_another_configuration_is_another_checkpoint(checkpoint):
    was = identity_of(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1e6}))
    assert identity_of(checkpoint) != was


@pytest.mark.parametrize("count", [10, MOST_PLACES // 2, MOST_PLACES // 2 + 1])
def test_of_many_tensors_each_is_looked_at(tmp_path, count):
    tensors = {f"t{number:05}": b"\0" * 4 for number in range(count)}
    one = made(tmp_path / "one", tensors)
    for name in (min(tensors), max(tensors)):
        other = made(tmp_path / name, {**tensors, name: b"\1\0\0\0"})
        assert identity_of(one) != identity_of(other)


def test_it_is_read_again_only_when_a_file_was_replaced(checkpoint, monkeypatch):
    reads = []

    def counted(folder: Path) -> str:
        reads.append(folder)
        return identity_of(folder)

    monkeypatch.setattr("workers.engine.weights.checkpoint_identity.identity_of", counted)
    identity = CheckpointIdentity(checkpoint)
    marks, first = marks_of(checkpoint), identity.now()
    assert (identity.now(), identity.of(marks), len(reads)) == (first, first, 1)
    file(checkpoint / "new", {**TENSORS, "b": b"\3" * 16})
    (checkpoint / "new").replace(checkpoint / "model.safetensors")
    assert identity.of(marks) == "", "what was read before may be the old one or the new one"
    assert identity.now() != first
    assert len(reads) == 2


def test_a_disk_that_is_away_leaves_what_was_known_and_a_first_look_says_why(checkpoint):
    known, new = CheckpointIdentity(checkpoint), CheckpointIdentity(checkpoint)
    was = known.now()
    shutil.rmtree(checkpoint)
    assert known.now() == was
    with pytest.raises(UnreadableCheckpoint, match="cannot be read"):
        new.now()
    assert new.of(marks_of(checkpoint)) == ""


def test_without_weights_any_of_its_configuration_is_wanted(checkpoint):
    whole, dot, config = identity_of(checkpoint).partition(".")
    assert (len(whole), dot, len(config)) == (32, ".", 16)
    assert CheckpointIdentity(checkpoint).wanted() == identity_of(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    assert CheckpointIdentity(checkpoint).wanted() == f".{config}"
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1e6}))
    assert CheckpointIdentity(checkpoint).wanted() not in (f".{config}", "")


@pytest.mark.parametrize("missing", ["the weights of an index", "config.json"])
def test_a_folder_that_is_not_whole_wants_nothing(checkpoint, missing):
    (checkpoint / "model.safetensors").unlink()
    if missing == "config.json":
        (checkpoint / missing).unlink()
    else:
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(UnreadableCheckpoint, match="cannot be read"):
        CheckpointIdentity(checkpoint).wanted()


@pytest.mark.parametrize("raw", [b"", b"\xff" * 100, b"\2\0\0\0\0\0\0\0[]", b'\7\0\0\0\0\0\0\0{"a":1}'])
def test_what_is_no_safetensors_file_has_no_identity(checkpoint, raw):
    (checkpoint / "model.safetensors").write_bytes(raw)
    with pytest.raises(UnreadableCheckpoint, match="cannot be read"):
        identity_of(checkpoint)
