"""What fuzzing found: figures that are numbers, and yet none that can be counted with."""

from __future__ import annotations

import pytest

from controller.core.errors import ConfigError
from controller.simulator.workloads.sources import parse_row
from workers.actions.sleep_client import parse_state
from workers.actions.weights_client import EngineAway
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
