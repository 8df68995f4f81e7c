from __future__ import annotations

from workers.backends.vllm import parse_load

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
