"""What fuzzing found: figures that are numbers, and yet none that can be counted with."""

from __future__ import annotations

import pytest

from api.openai.state.telemetry import readable
from controller.core.errors import ConfigError
from controller.core.types import Load, Role
from controller.simulator.workloads.sources import parse_row
from workers.actions.sleep_client import parse_state
from workers.actions.weights_client import EngineAway
from workers.backends import sglang_state
from workers.backends.base import EngineError
from workers.backends.vllm import parse_load

AWAKE = 'vllm:engine_sleep_state{sleep_state="awake"} 1\n'


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999"])
@pytest.mark.parametrize("name", ["vllm:num_requests_running", "vllm:kv_cache_usage_perc"])
def test_an_engine_with_figures_without_a_bound_is_unreadable(name: str, value: str) -> None:
    """`int(inf)` is an OverflowError, which ended the gateway's poll of that engine."""
    with pytest.raises(ValueError, match="not finite"):
        parse_load(f"{name} {value}\n", 0.0)


@pytest.mark.parametrize("value", ["inf", "nan", "1e999"])
def test_a_sleep_state_with_them_is_unreadable(value: str) -> None:
    with pytest.raises(EngineAway, match="not finite"):
        parse_state(f"{AWAKE}vllm:num_requests_running{{}} {value}\n")


@pytest.mark.parametrize("value", ["inf", "1e999"])
def test_a_row_of_a_trace_with_them_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match="row 7 of the trace"):
        parse_row({"input_tokens": value, "output_tokens": "1"}, 7)


@pytest.mark.parametrize("name", ["num_running_reqs", "num_waiting_reqs", "token_usage"])
@pytest.mark.parametrize("value", ['{"load5s": [{}]}', "[1]", '"many"', "1e400"])
def test_an_sglang_server_whose_counts_are_not_numbers_is_unreadable(name: str, value: str) -> None:
    """`1e400` is read as no number at all by orjson, which is an EngineError as well."""
    raw = f'{{"loads": [{{"{name}": {value}}}]}}'.encode()
    with pytest.raises(EngineError):
        sglang_state.parse_loads(raw, 0.0, Role.COLLOCATED)


@pytest.mark.parametrize("value", ["inf", "nan", "1e999"])
@pytest.mark.parametrize("name", ["num_running_reqs", "num_queue_reqs", "token_usage", "prompt_tokens_total"])
def test_a_metrics_page_of_sglang_with_figures_without_a_bound_is_unreadable(name: str, value: str) -> None:
    with pytest.raises(EngineError, match="expected a number"):
        sglang_state.parse_metrics(f"sglang:{name} {value}\n")


def test_counts_of_sglang_whose_sum_is_too_large_are_unreadable() -> None:
    ranks = "".join(f'sglang:prompt_tokens_total{{dp_rank="{rank}"}} 1e308\n' for rank in range(2))
    with pytest.raises(EngineError, match="prompt_tokens_total"):
        sglang_state.parse_metrics(ranks)


@pytest.mark.parametrize("fields", [{"waiting": None}, {"running": None}, {"kv_usage": None}, {"awake": None}])
def test_a_load_that_lacks_what_every_engine_has_is_unreadable(fields: dict[str, None]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} is None"):
        readable(Load(1.0)._replace(**fields))


def test_a_load_without_what_some_engines_do_not_report_is_read() -> None:
    assert readable(Load(1.0, kv_capacity_tokens=None, max_num_seqs=None)).observed_at == 1.0
