"""What the `spec` of an instance of provisioner `process` may contain; it becomes the options of its reference
engine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from controller.core.steps import BOUNDARIES

BLOCK_SIZE = 16  # the engine's default
EMULATED_TOKEN_BYTES = 131_072  # of KV; a real model says itself how large its tokens are
# Options of `python -m workers.engine`, with underscores in place of hyphens.
OPTIONS = (
    *("profile", "role", "model", "seed", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_blocks"),
    "context_tokens",
    *("block_size", "scheduling_policy", "batching", "batching_options", "startup_delay", "scheduler", "boundary"),
    *("chunk_tokens", "executor", "served_model_name", "device", "dtype", "threads", "kv_cache_gib", "tensor_parallel"),
    *("weights", "host_copy", "emulated_load_s", "emulated_weight_bytes", "swap_bytes"),
)
FLAGS = ("deadlines", "keep_room")  # options without a value
OWN_FIELDS = {  # set on the instance itself; a value in `spec` would be ignored silently
    "model": "model",
    "served_model_name": "model",
    "role": "role",
    "context_tokens": "model",
    "max_num_seqs": "max_num_seqs",
    "tensor_parallel": "tp",
    "url": "url",
    "id": "id",
}
NOTES = (
    "folder",  # of a real model's weights (executor torch)
    "kv_capacity_tokens",  # becomes kv_blocks
    "start_after",  # epoch seconds before which a replacement does not start
)
SAYABLE = tuple(sorted({*OPTIONS, *FLAGS, *NOTES} - OWN_FIELDS.keys()))
PROFILES = (  # shipped profiles; a constant time or a file is valid as well
    *("aic/Llama-3.1-8B/A100-SXM-80GB/tp1", "llama-3.1-8b-a100", "aic/Llama-3.1-8B/H100-SXM-80GB/tp1"),
    *("llama-3.1-8b-h100", "aic/Qwen2.5-7B/A100-SXM-80GB/tp1", "qwen2.5-7b-a100"),
    *("aic/Qwen2.5-14B/A100-SXM-80GB/tp1", "qwen2.5-14b-a100", "aic/Qwen3-32B/A100-SXM-80GB/tp2"),
    *("qwen3-32b-a100-tp2", "aic/Qwen3-32B/H100-SXM-80GB/tp2", "qwen3-32b-h100-tp2"),
    *("aic/Llama-3.1-70B/A100-SXM-80GB/tp4", "llama-3.1-70b-a100-tp4", "aic/Llama-3.1-70B/H100-SXM-80GB/tp4"),
    *("llama-3.1-70b-h100-tp4", "vidur/Llama-2-70B/A100-SXM-80GB/tp2", "llama-2-70b-a100-tp2"),
    *("slackline/llama-8b/nvidia-h100-80gb-hbm3/tp1", "llama-8b-nvidia-h100-80gb-hbm3"),
)
# Name of a profile whose steps all take this long.
CONSTANT = re.compile(r"constant:(?P<number>\d+(?:\.\d+)?)(?P<unit>us|ms|s)")
PREEMPTIVE_BATCHING = "slo_aware_batching"
SOURCES = ("engine", "host", "disk")  # of weights
DAY_S = 86_400.0
MOST = (1 << 31) - 1
MOST_BYTES = 1 << 50


class Rule(NamedTuple):
    """What a value may be, in words and as a test. `choices`: all valid values, if they can be listed."""

    allowed: str
    fits: Callable[[object], bool]
    choices: tuple[str, ...] = ()


def _whole(least: int, most: int = MOST) -> Rule:
    def fits(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return Rule(f"a whole number from {least} to {most}", fits)


def _real(allowed: str, within: Callable[[float], bool]) -> Rule:
    def fits(value: object) -> bool:
        number = _number(value)
        return number is not None and within(number)

    return Rule(allowed, fits)


def _number(value: object) -> float | None:
    """The value as a finite float, else None: Python's JSON accepts NaN, Infinity and integers that no float can
    hold.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def _one_of(*names: str) -> Rule:
    return Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names, names)


def _is_profile(value: object) -> bool:
    return isinstance(value, str) and (
        value in PROFILES or CONSTANT.fullmatch(value) is not None or (value.endswith(".json") and "\0" not in value)
    )


def _is_folder(value: object) -> bool:
    """Whether it is an absolute path. Only the engine, perhaps on another host, can tell whether the folder exists."""
    return isinstance(value, str) and value.startswith("/") and "\0" not in value


def _are_load_times(value: object) -> bool:
    if not isinstance(value, str):
        return False
    return all(_is_load_time(*item.split("=", 1)) for item in value.split(",") if item)


def _is_load_time(source: str, seconds: str = "") -> bool:
    try:
        return source in SOURCES and 0 <= float(seconds) < DAY_S
    except ValueError:
        return False


_FOLDER = Rule("the absolute path of a folder on its engine's host", _is_folder)
_TRUTH = Rule("true or false", lambda value: isinstance(value, bool))
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "profile": Rule(f"one of {', '.join(PROFILES)}, constant:<number><us|ms|s>, or a .json file", _is_profile),
        "seed": _whole(-MOST),
        "max_num_batched_tokens": _whole(1),
        "max_model_len": _whole(1),
        "kv_blocks": _whole(1),
        "kv_capacity_tokens": _whole(1),
        "block_size": _whole(1, 1 << 20),
        "scheduling_policy": _one_of("priority", "fcfs"),
        "batching": _one_of(
            *("calm", "chunked_prefill", "credit_based", "earliest_deadline_first", "iteration_level"),
            *("kairos_decode", "kairos_urgency", "kairos_urgency_printed", "learned_rank", "least_attained_service"),
            *("ordered_chunks", "shortest_job_first", "simulated_annealing", "slo_aware_batching", "vllm_v1"),
        ),
        "batching_options": Rule(
            "an object of the batching policy's settings", lambda value: isinstance(value, Mapping)
        ),
        "startup_delay": _real(f"a number of seconds from 0 to below {DAY_S:.0f}", lambda value: 0 <= value < DAY_S),
        "scheduler": _one_of("continuous", "preemptive", "slackline"),
        "boundary": _one_of(*BOUNDARIES),
        "chunk_tokens": _whole(1),
        "executor": _one_of("emulated", "torch"),
        "device": _one_of("cpu", "cuda"),
        "dtype": _one_of("auto", "float32", "bfloat16", "float16"),
        "threads": _whole(1, 4096),
        "kv_cache_gib": _real("a number above 0 and at most 1048576", lambda value: 0 < value <= 1 << 20),
        "weights": _one_of("present", "absent"),
        "host_copy": _FOLDER,
        "folder": _FOLDER,
        "emulated_load_s": Rule(
            "seconds from 0 by source of the weights, as in engine=0.9,host=2.7,disk=4.1", _are_load_times
        ),
        "emulated_weight_bytes": _whole(0, MOST_BYTES),
        "swap_bytes": _whole(0, MOST_BYTES),
        "deadlines": _TRUTH,
        "keep_room": _TRUTH,
    }
)
# Fields that gateways and services read for static instances too.
READ_OF_ALL = ("kv_capacity_tokens", "max_model_len", "weights", "batching_options")


def refusal(names: Iterable[str]) -> str:
    """What is wrong with these names of a `spec`, and which are valid; "" if nothing is."""
    said = set(names)
    if misplaced := sorted(said & OWN_FIELDS.keys()):
        return f"{misplaced[0]} does not belong here: set the instance's own {OWN_FIELDS[misplaced[0]]}."
    if unknown := sorted(said - set(SAYABLE)):
        return f"unknown: {', '.join(unknown)}; known: {', '.join(SAYABLE)}."
    return ""


def values_refused(spec: Mapping[str, Any], now: float, max_num_seqs: int = 1, ranks: int = 1) -> dict[str, str]:
    """What each invalid value of a `spec` may be, by name. A value of None counts as not given.

    `now`: epoch seconds. `max_num_seqs`, `ranks` (its `tp`): of the instance itself.
    """
    wrong = _unfit(spec, RULES) | start_refused(spec, now)
    return wrong or _at_odds(spec, max_num_seqs, ranks)


def values_refused_of_all(spec: Mapping[str, Any], now: float) -> dict[str, str]:
    """The same for a static instance, whose `spec` may hold other fields as notes."""
    return _unfit(spec, {name: RULES[name] for name in READ_OF_ALL}) | start_refused(spec, now)


def start_refused(spec: Mapping[str, Any], now: float) -> dict[str, str]:
    """A start more than a day ahead is refused as a typing error."""
    value = spec.get("start_after")
    at = _number(value)
    if value is None or (at is not None and 0 <= at <= now + DAY_S):
        return {}
    return {"start_after": "must be a time in epoch seconds, at most a day ahead."}


def start_after(spec: Mapping[str, Any]) -> float | None:
    """Epoch seconds before which the instance does not start; 0 if not given, None if the value is not a time."""
    value = spec.get("start_after")
    return _number(value) if value else 0.0


def whole_number(spec: Mapping[str, Any], name: str) -> int | None:
    """The value, or None if it is absent or invalid (rows older than the validation may have invalid values)."""
    value = spec.get(name)
    return value if isinstance(value, int) and RULES[name].fits(value) else None


def _unfit(spec: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, str]:
    said = {name: value for name, value in spec.items() if name in rules and value is not None}
    return {name: f"must be {rules[name].allowed}." for name, value in said.items() if not rules[name].fits(value)}


def _at_odds(spec: Mapping[str, Any], max_num_seqs: int, ranks: int) -> dict[str, str]:
    """Values that are valid alone and that the engine refuses in combination."""
    wrong = {}
    step = spec.get("max_num_batched_tokens")
    if step is not None and step < max_num_seqs:
        wrong["max_num_batched_tokens"] = f"must be at least max_num_seqs, which is {max_num_seqs}: each needs a token."
    torch, scheduler = spec.get("executor") == "torch", spec.get("scheduler") or "continuous"
    if torch and not spec.get("folder"):
        wrong["folder"] = "executor torch needs it: where the model's config and safetensors lie."
    for name in ("host_copy", "keep_room"):
        if spec.get(name) and not torch:
            wrong[name] = "needs executor torch."
    if spec.get("deadlines") and scheduler != "slackline":
        wrong["deadlines"] = "needs scheduler slackline."
    batching = spec.get("batching")
    if batching and scheduler == "slackline":
        wrong["batching"] = "scheduler slackline chooses it by the role."
    if batching not in (None, PREEMPTIVE_BATCHING) and scheduler == "preemptive":
        wrong["batching"] = f"the preemptive scheduler batches by {PREEMPTIVE_BATCHING}."
    if spec.get("swap_bytes"):
        wrong |= _swap_refused(spec, torch, scheduler, ranks)
    for name in ("boundary", "chunk_tokens"):
        if spec.get(name) is not None and scheduler == "continuous":
            wrong[name] = "needs scheduler preemptive."
    held, longest = None if torch else _held(spec), spec.get("max_model_len")
    if held is not None and longest is not None and longest > held:
        wrong["max_model_len"] = f"must fit into the KV cache of {held} tokens that these settings give."
    return wrong


def _swap_refused(spec: Mapping[str, Any], torch: bool, scheduler: str, ranks: int) -> dict[str, str]:
    if ranks > 1:
        return {"swap_bytes": f"an engine of {ranks} ranks swaps no KV: set it to 0, or tp to 1."}
    if scheduler == "preemptive":
        return {"swap_bytes": "the preemptive scheduler evicts no sequence."}
    block_bytes = EMULATED_TOKEN_BYTES * (spec.get("block_size") or BLOCK_SIZE)
    if not torch and spec["swap_bytes"] < block_bytes:
        return {"swap_bytes": f"must be 0 or hold at least one KV block of {block_bytes} bytes."}
    return {}


def _held(spec: Mapping[str, Any]) -> int | None:
    """Tokens of the KV cache; None: as the profile says."""
    size: int = spec.get("block_size") or BLOCK_SIZE
    blocks: int | None = spec.get("kv_blocks")
    if blocks is None and spec.get("kv_capacity_tokens") is not None:
        blocks = max(1, spec["kv_capacity_tokens"] // size)
    return None if blocks is None else blocks * size
