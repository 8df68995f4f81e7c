"""Runs vLLM's own scheduler with the plug-in, without a model: `python tests/vllm/scheduler_script.py CASE`.

In vLLM's environment, with this repository on PYTHONPATH. Tokens are made up, and everything else (queue, KV blocks,
preemption, asynchronous steps) is vLLM's. `layouts` is about the KV connector. Prints one JSON object. Used by
test_plugin_scheduler.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from workers.vllm_plugin.hints import PluginHints, hint_fields
from workers.vllm_plugin.policy import EngineNow, StepPlan
from workers.vllm_plugin.scheduler import SlacklineScheduler

MODEL = Path(sys.prefix) / "model"
BLOCK = 16


def scheduler(settings: dict[str, Any], seats: int = 1, blocks: int = 1000, policy: str = "fcfs") -> Any:
    model = ModelConfig(model=str(MODEL), dtype="bfloat16", max_model_len=2048, enforce_eager=True)
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seats, max_num_batched_tokens=2048, max_model_len=2048, is_encoder_decoder=False,
            policy=policy, async_scheduling=True,
        ),
        additional_config={"slackline": settings},
    )  # fmt: skip
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return SlacklineScheduler(
        vllm_config=config, kv_cache_config=kv, structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK, log_stats=True,
    )  # fmt: skip


def request(
    name: str, hints: PluginHints, tokens: int = 4, prompt: int = 32, extras: dict[str, Any] | None = None
) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args={**hint_fields(hints), **(extras or {})})
    init_none_hash(hash)
    return Request(
        request_id=name, prompt_token_ids=[7] * prompt, sampling_params=params, pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, hash),
    )  # fmt: skip


class Driver:
    """Runs steps until nothing is left; results come one step late, as under asynchronous scheduling."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.first: list[str] = []  # in the order of their first step
        self.ended: list[str] = []
        self.ran: list[list[str]] = []
        self._late: list[Any] = []

    def step(self) -> None:
        self.of.current = None
        output = self.of.schedule()
        names = list(output.num_scheduled_tokens)
        self.ran.append(names)
        self.first += [name for name in names if name not in self.first]
        self._late.append(output)
        if len(self._late) > 1:
            self.result()

    def result(self) -> None:
        output = self._late.pop(0)
        names = list(output.num_scheduled_tokens)
        sampled = [[5] if output.num_scheduled_tokens[name] else [] for name in names]
        before = set(self.of.requests)
        made = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        self.of.update_from_output(output, made)
        self.ended += sorted(before - set(self.of.requests))

    def drain(self, most: int = 500) -> None:
        for _ in range(most):
            if not self.of.requests:
                return
            self.step()
        raise RuntimeError(f"still open after {most} steps: {sorted(self.of.requests)}")


def by_deadline(order: str, policy: str = "fcfs") -> dict[str, Any]:
    """One seat, taken; then three requests whose deadlines are in another order than their arrivals."""
    of = scheduler({"order": order}, policy=policy)
    driver = Driver(of)
    of.add_request(request("running", PluginHints(), tokens=6))
    driver.step()
    for name, left_s in (("late", -5.0), ("far", 300.0), ("near", 100.0), ("none", float("inf"))):
        of.add_request(request(name, PluginHints(left_s, 400.0, 1.0)))
    driver.drain()
    return {"first": driver.first, "kept": len(of._seqs)}


def forged() -> dict[str, Any]:
    """Values that no gateway sends are as good as none."""
    of = scheduler({"order": "edf"})
    driver = Driver(of)
    of.add_request(request("running", PluginHints(), tokens=6))
    driver.step()
    of.add_request(request("near", PluginHints(50.0, 400.0)))
    for name, value in (("text", "-1"), ("huge", -1e300), ("nan", float("nan")), ("list", [1.0])):
        extras = {"slackline_ttft": value, "slackline_ttft_left": value, "slackline_tpot": value}
        of.add_request(request(name, PluginHints(), extras=extras))
    driver.drain()
    return {"first": driver.first}


def aborted() -> dict[str, Any]:
    of = scheduler({"order": "calm"}, seats=2)
    driver = Driver(of)
    for name in "abcd":
        of.add_request(request(name, PluginHints(10.0, 10.0, 0.5), tokens=20))
    driver.step()
    driver.step()
    from vllm.v1.request import RequestStatus

    of.finish_requests(["a", "c"], RequestStatus.FINISHED_ABORTED)
    driver.drain()
    return {"ended": sorted(driver.ended), "kept": len(of._seqs)}


def preempted(order: str, decode: str = "all") -> dict[str, Any]:
    """Too few blocks for all: some are preempted, all end with all their tokens."""
    of = scheduler({"order": order, "decode": decode} if decode != "all" else {"order": order}, seats=4, blocks=14)
    driver = Driver(of)
    made = [request(name, PluginHints(1.0 + at, 5.0, 0.5), tokens=60) for at, name in enumerate("abcdef")]
    for each in made:
        of.add_request(each)
    driver.drain()
    return {
        "tokens": {each.request_id: each.num_output_tokens for each in made},
        "preempted": sum(each.num_preemptions for each in made),
        "kept": len(of._seqs),
        "held": of.kv_cache_manager.usage,
    }


def paused() -> dict[str, Any]:
    """Long and short sequences that decode: the slack-guided choice lets the long one sit out steps, not for ever."""
    options = {"decode_a": 0.0, "decode_b": 1e-3, "decode_c": 1e-4, "profile": "longest"}
    of = scheduler({"order": "s_edf", "decode": "kairos_decode", "decode_options": options}, seats=4)
    driver = Driver(of)
    of.add_request(request("long", PluginHints(9.0, 9.0, 5.0), tokens=12, prompt=1500))
    for name in "abc":
        of.add_request(request(name, PluginHints(9.0, 9.0, 0.4), tokens=12))
    driver.drain()
    alone = sum("long" not in step and bool(step) for step in driver.ran[2:14])
    return {"alone": alone, "ended": driver.ended}


def full() -> dict[str, Any]:
    """A plan that pauses all who run for one that waits, again and again, while those who run hold the blocks."""
    of = scheduler({"order": "calm"}, seats=4, blocks=8)
    driver = Driver(of)
    for name in "ab":
        of.add_request(request(name, PluginHints(), tokens=8, prompt=40))
    driver.step()
    driver.step()

    def plan(engine: EngineNow, now: float) -> StepPlan | None:
        return StepPlan(engine.queue, paused=engine.running) if engine.queue else None

    of._policy.plan = plan
    of.add_request(request("tight", PluginHints(5.0, 5.0), tokens=4, prompt=40))
    for _ in range(60):
        if of.requests:
            driver.step()
    return {"ended": sorted(driver.ended), "kept": len(of._seqs)}


def layouts() -> dict[str, Any]:
    """Digests of equally long KV, by its numbers and by what packed it."""
    from workers.vllm_connector import connector

    packed = connector._get_attn_isa

    def digest(numbers: torch.dtype, packing: str) -> str:
        connector._get_attn_isa = lambda *_: packing
        model = ModelConfig(model=str(MODEL), dtype=numbers, max_model_len=2048, enforce_eager=True)
        caches = {"layer": torch.zeros(4, 2, dtype=numbers)}
        about = connector._about(model, BLOCK, caches)
        arrays = {name: connector._as_bytes(name, cache) for name, cache in caches.items()}
        return str(connector.CacheBlocks(arrays, 4, BLOCK, about).layout["digest"])

    made = {
        "bfloat16": digest(torch.bfloat16, "vec"),
        "again": digest(torch.bfloat16, "vec"),
        "float16": digest(torch.float16, "vec"),
        "amx": digest(torch.bfloat16, "amx"),
    }
    connector._get_attn_isa = packed
    return {**made, "here": packed(torch.bfloat16, BLOCK, 64)}


CASES = {
    "layouts": layouts,
    "full": full,
    "s_edf": lambda: by_deadline("s_edf"),
    "edf": lambda: by_deadline("edf"),
    "heap": lambda: by_deadline("s_edf", "priority"),
    "fcfs": lambda: by_deadline("fcfs"),
    "urgency": lambda: by_deadline("kairos_urgency"),
    "calm": lambda: by_deadline("calm"),
    "forged": forged,
    "aborted": aborted,
    "preempted_edf": lambda: preempted("s_edf"),
    "preempted_calm": lambda: preempted("calm"),
    "preempted_slack": lambda: preempted("s_edf", "kairos_decode"),
    "paused": paused,
}

if __name__ == "__main__":
    print(json.dumps({name: CASES[name]() for name in sys.argv[1:]}))
