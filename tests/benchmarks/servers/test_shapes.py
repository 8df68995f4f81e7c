"""The shapes of random models, and options that name a device this machine lacks."""

import json

import pytest

from benchmarks.machine.names import keep, machine_name
from benchmarks.servers.shapes import SHAPES


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
