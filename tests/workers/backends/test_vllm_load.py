from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from controller.core.types import InstanceSpec
from workers.backends.base import CallTargets, Limits, UpstreamCall
from workers.backends.hints import Hints
from workers.backends.vllm import VllmBackend, parse_load

PAGE = """# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",gpu_memory_utilization="0.9"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1234.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 5.6e+01
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0
process_resident_memory_bytes 1e9
"""


def test_counts_are_summed_over_engines() -> None:
    load = parse_load(PAGE, 42.0)
    assert (load.observed_at, load.running, load.waiting, load.kv_usage) == (42.0, 7, 2, 0.5)
    assert (load.kv_capacity_tokens, load.prompt_tokens_total, load.generation_tokens_total) == (3200, 1234, 56)
    assert load.awake


def test_a_sleeping_engine_is_seen() -> None:
    assert not parse_load(PAGE.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0'), 0.0).awake


def test_what_is_not_said_is_unknown() -> None:
    load = parse_load('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n', 0.0)
    assert (load.kv_capacity_tokens, load.max_num_seqs, load.running) == (None, None, 0)


HINTED = UpstreamCall("r1", "/v1/completions", b'{"model":"m"', 3, True, False, targets=CallTargets(2.0, 0.05, 0.75))


def body_after(page: str, call: UpstreamCall) -> dict[str, Any]:
    """What is sent once the server's metrics were read."""
    backend = VllmBackend(InstanceSpec("a", "m", "http://127.0.0.1:1"), None, Limits())  # type: ignore[arg-type]

    async def read(path: str, limit_s: float | None = None) -> bytes:
        return page.encode()

    backend._get = read  # type: ignore[method-assign]
    asyncio.run(backend.telemetry(0.0))
    sent: dict[str, Any] = json.loads(backend.body_of(call))
    return sent


@pytest.mark.parametrize("line", ["slackline:vllm_plugin_info 1.0", 'slackline:vllm_plugin_info{pid="7"} 1.0'])
def test_a_server_that_announces_the_plug_in_gets_what_is_left_of_the_targets(line: str) -> None:
    sent = body_after(f"{PAGE}{line}\n", HINTED)
    assert sent["vllm_xargs"] == {"slackline_ttft": 2.0, "slackline_ttft_left": 1.25, "slackline_tpot": 0.05}
    assert (sent["model"], sent["priority"]) == ("m", 3)


def test_bounds_and_deadlines_are_told_as_to_a_reference_engine() -> None:
    call = replace(HINTED, targets=None, hints=Hints(due_s=3.0, lower=2, upper=40))
    sent = body_after(f"{PAGE}slackline:vllm_plugin_info 1.0\n", call)
    assert sent["vllm_xargs"] == {"slackline_due_in": 3.0, "slackline_length_lower": 2, "slackline_length_upper": 40}


def test_other_servers_get_no_hints() -> None:
    assert "vllm_xargs" not in body_after(PAGE, HINTED)
    assert "vllm_xargs" not in body_after(f"{PAGE}# HELP slackline:vllm_plugin_info 1.0\n", HINTED)


def test_the_clients_own_extras_stay_beside_the_hints() -> None:
    call = replace(HINTED, head=b'{"model":"m","vllm_xargs":{"mine":1}')
    sent = body_after(f"{PAGE}slackline:vllm_plugin_info 1.0\n", call)
    assert sent["vllm_xargs"].items() >= {"mine": 1, "slackline_ttft": 2.0}.items()
