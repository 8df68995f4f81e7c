"""The shapes of random models, and options that name a device this machine lacks."""

import json
from argparse import ArgumentParser

import pytest

from benchmarks.machine.names import keep, machine_name
from benchmarks.servers.shapes import SHAPES, add_shape_options, random_model
from controller.core.errors import ConfigError
from workers.engine.model_config import read_config


def test_llama_8b_is_the_published_size():
    assert SHAPES["llama-8b"].parameters == 8_030_261_248


def test_scale_out_moves_a_gigabyte_by_default():
    assert 2 * SHAPES["half-billion"].parameters >= 1e9


@pytest.mark.parametrize("name", SHAPES)
def test_all_have_llama_3s_proportions(name):
    shape = SHAPES[name]
    assert shape.feed_forward == 3.5 * shape.hidden
    assert shape.hidden % shape.heads == shape.heads % shape.kv_heads == 0


def test_figures_are_kept_by_benchmark_and_machine(tmp_path):
    path = keep("scaleout", {"link_share": 0.5}, "NVIDIA H100 80GB HBM3", tmp_path)
    assert path == tmp_path / "scaleout" / f"{machine_name()}-nvidia-h100-80gb-hbm3.json"
    assert json.loads(path.read_text()) == {"link_share": 0.5}
    keep("scaleout", {"link_share": 0.75}, "NVIDIA H100 80GB HBM3", tmp_path)
    assert json.loads(path.read_text()) == {"link_share": 0.75}


@pytest.mark.torch
def test_a_kept_random_model_is_written_once_and_fits_the_longest_prompts(tmp_path):
    def asked(*options, context):
        args = parser.parse_args(["--model-folder", str(tmp_path), "--shape", "tiny", "--dtype", "bfloat16", *options])
        assert random_model(args, tmp_path / "unused", context)[0] == tmp_path
        written = tmp_path / "model.safetensors"
        return written.stat().st_mtime_ns, written.stat().st_size, read_config(tmp_path).max_positions

    parser = ArgumentParser()
    add_shape_options(parser, "tiny")
    first, size, context = asked(context=100)
    assert context == 100
    assert asked(context=300) == (first, size, 300)
    assert asked(context=200) == (first, size, 300)
    other, larger, context = asked("--dtype", "float32", context=200)
    assert (other > first, larger > size, context) == (True, True, 200)
    assert not (tmp_path / "unused").exists()


@pytest.mark.torch
def test_a_model_folder_has_one_model_and_never_somebody_elses(tmp_path):
    def asked(folder, shape):
        args = parser.parse_args(["--model-folder", str(folder), "--shape", shape, "--dtype", "bfloat16"])
        return random_model(args, folder, 100)[1]

    parser = ArgumentParser()
    add_shape_options(parser, "tiny")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    small = asked(ours, "tiny")
    (ours / "model-00001-of-00002.safetensors").write_bytes(b"of a larger one")
    (ours / "shape.txt").write_text("llama-8b bfloat16")
    assert asked(ours, "tiny") == small
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no benchmark wrote"):
        asked(theirs, "tiny")
    assert list(theirs.iterdir()) == [theirs / "config.json"]
