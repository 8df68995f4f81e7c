"""Two tensor-parallel ranks in two processes: the same tokens as one, and one place to stop at."""

import json
import random
import subprocess
import sys

import pytest

from tests.workers.engine.torch.bench import folder, program
from tests.workers.engine.torch.test_pool import Pool, step_of
from workers.engine.model_config import read_config
from workers.engine.torch.model.transformer import Model
from workers.engine.torch.rank_counter import room
from workers.engine.torch.ranks import Alone

pytestmark = [pytest.mark.torch, pytest.mark.long(55)]
TIMES = 1000  # steps that were really suspended, not signals: some of those come in the last operator


def run_ranks(tmp_path, path, times, boundary):
    (tmp_path / "store.counter").write_bytes(bytes(room(2)))
    command = [sys.executable, "-m", "tests.workers.engine.torch.rank", str(path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), str(times), boundary], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        return [json.loads(rank.communicate(timeout=240)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def commands_of(commands, step_id):
    length = commands.randint(2, 60)
    return [commands.randrange(500) for _ in range(length)]


@pytest.mark.parametrize(
    ("boundary", "times"), [pytest.param("OPERATOR", TIMES, marks=pytest.mark.slow), ("LAYER", 100)]
)
@pytest.mark.sampled(1)
def test_ranks_stop_at_the_same_operator_and_never_wait_for_each_other(tmp_path, boundary, times):
    first, second = run_ranks(tmp_path, folder(), times, boundary)
    assert first == second
    stops = [stop for stop in first["stops"] if stop is not None]
    assert len(stops) >= times
    boundaries = (5, 10) if boundary == "LAYER" else range(1, 11)
    assert set(stops) == set(boundaries)
    together = dict(first["together"])
    assert together == {told: next(stop for stop in boundaries if stop >= told) for told in range(1, 11)}
    assert set(map(tuple, first["together"])) == set(together.items()), "at the next boundary each time"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"])
def test_two_ranks_sample_what_one_does(tmp_path, architecture):
    first, second = run_ranks(tmp_path, folder(architecture), 30, "OPERATOR")
    assert first["tokens"] == second["tokens"]
    with Pool(program(folder(architecture), 200)) as pool:
        pool.executor.start(step_of(1, commands_of(random.Random(99), 1)))
        assert first["tokens"]["1"] == pool.next().sampled[0].token


def test_a_model_that_cannot_be_split_is_refused():
    class Three(Alone):
        world = 3

    with pytest.raises(ValueError, match="kv_heads=4 cannot be split over 3 ranks"):
        Model(read_config(folder()), program(folder()).model.device, program(folder()).model.dtype, Three())
