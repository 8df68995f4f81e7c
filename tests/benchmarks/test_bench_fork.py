"""What the benchmark of forks reads of engines, and how it sums up."""

from types import SimpleNamespace

import pytest

from benchmarks import bench_fork
from benchmarks.bench_fork import BLOCKS, MostBlocks, blocks, figure, merged
from tests.waiting import until

METRICS = """# HELP vllm:x a metric
vllm:x{engine="0"} 2.0
vllm:x{engine="1"} 3.5
vllm:x_total 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(bench_fork.requests, "get", lambda url, timeout: SimpleNamespace(text=METRICS))
    return SimpleNamespace(url="http://engine")


def test_a_figure_is_the_sum_of_its_own_samples(engine):
    assert (figure(engine, "vllm:x"), figure(engine, "vllm:x_total"), figure(engine, "vllm:y")) == (5.5, 9.0, 0)


def test_blocks_are_those_of_all_engines(engine):
    assert blocks([engine, engine]) == BLOCKS // 2
    with MostBlocks([engine]) as most:
        until(lambda: most.seen, 5)
    assert most.seen == BLOCKS // 4


def test_repetitions_are_summed_up_by_their_medians():
    found = [
        {"kv_blocks": 3, "first_token_s": 0.1},
        {"kv_blocks": 9, "first_token_s": 0.3},
        {"kv_blocks": 4, "first_token_s": 0.2},
    ]
    assert merged(found) == {"kv_blocks": 4, "first_token_s": 0.2}
