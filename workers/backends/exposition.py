"""The few lines of vLLM's Prometheus page that a dispatcher needs. Missing series stay at their defaults."""

from __future__ import annotations

import re

from controller.core.types import Load

_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SUMMED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens_total",
    "vllm:generation_tokens_total": "generation_tokens_total",
}
_KV_USAGE = "vllm:kv_cache_usage_perc"
_SLEEP = "vllm:engine_sleep_state"
_CACHE = "vllm:cache_config_info"
_SLOTS = "vllm:max_num_seqs"  # the reference engine's addition; vLLM itself does not say


def parse_load(text: str, observed_at: float) -> Load:
    """Sums over data-parallel engines; KV usage is the fullest engine's, capacity the sum."""
    counts = dict.fromkeys(_SUMMED.values(), 0)
    usage, capacity, slots, asleep = 0.0, 0, 0, False
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name, _, _ = line.partition("{") if "{" in line else line.partition(" ")
        if name in _SUMMED:
            counts[_SUMMED[name]] += int(_value(line))
        elif name == _KV_USAGE:
            usage = max(usage, _value(line))
        elif name == _CACHE:
            capacity += _capacity(line)
        elif name == _SLOTS:
            slots += int(_value(line))
        elif name == _SLEEP and 'sleep_state="awake"' in line:
            asleep = asleep or _value(line) == 0.0
    return Load(
        observed_at=observed_at,
        running=counts["running"],
        waiting=counts["waiting"],
        kv_usage=usage,
        kv_capacity_tokens=capacity or None,
        max_num_seqs=slots or None,
        prompt_tokens_total=counts["prompt_tokens_total"],
        generation_tokens_total=counts["generation_tokens_total"],
        awake=not asleep,
    )


def _value(line: str) -> float:
    return float(line.rsplit(" ", 1)[1])


def _capacity(line: str) -> int:
    labels = dict(_LABEL.findall(line))
    try:
        return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    except (KeyError, ValueError):  # a CPU or a test engine may say "None"
        return 0
