"""The operators of a real model, timed one by one, in the form that an experiment takes."""

import json

import pytest

from benchmarks.bench_preempt import BLOCK_SIZE
from benchmarks.torch import operators
from controller.predict.operator_profile import OPERATORS, read_operator_profile
from tests.workers.engine.torch.bench import folder, program

pytestmark = pytest.mark.torch


def test_a_tiny_model_is_measured_and_a_simulation_can_read_it(tmp_path, capsys):
    path = tmp_path / "operators.json"
    assert operators.main(["--shape", "tiny", "--lengths", "64,16", "--repeats", "2", "--output", str(path)]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == json.loads(path.read_text())
    assert [(row["tokens"], row["past"]) for row in said["rows"]] == [(16, 0), (64, 0), (16, 16), (16, 32), (16, 48)]
    found = read_operator_profile(said, 99)
    assert found.layers == 2
    assert all(seconds > 0 for seconds in found.durations(40, 1600))


def test_the_first_layer_and_the_output_layer_are_left_out():
    found = program(folder(), 16, BLOCK_SIZE)
    first, second = (9.0,) * 5, (2e-3, 8e-3, 1e-3, 4e-3, 3e-3)
    medians = operators.layer_medians(found, [[*first, *second, 7.0], [*first, *second, 7.0]])
    assert medians == dict(zip(OPERATORS, second, strict=True))


@pytest.mark.parametrize("wrong", [["--lengths", "a"], ["--lengths", "2"], ["--repeats", "0"]])
def test_wrong_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        operators.parse(wrong)
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err
