"""The fleet matrix: fleets that are unlike the demo's, each as one experiment of the simulator.

    python -m benchmarks.fleets.cells      (writes controller/simulator/experiments/fleets/)

Each file runs with `python -m controller.simulator compare FILE`; `make bench-fleets` runs all of them. A cell changes
one thing of the common fleet: two Qwen3-32B instances of two A100s each with 64 sequences, one gateway, HyperFlexis'
4-task mix for 30 seconds. Rates are multiples of the knee of engine_priority_deadline, the strongest
baseline that needs no scheduler of its own; where some instances cannot keep a target at all, of hyperflexis' knee.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "controller" / "simulator" / "experiments" / "fleets"
A100 = {  # Qwen3-32B, two A100s (benchmarks/data/latency_profiles.json)
    "prefill_a": 0.018962, "prefill_b": 1.2565e-4, "prefill_c": 2.9551e-9,
    "decode_a": 0.02455, "decode_b": 8.1592e-8, "decode_c": 8.8767e-5,
}  # fmt: skip
VLLM_CPU = {  # benchmarks/vllm/model.py in float32, one core of an Ice Lake Xeon: a step grows with each sequence
    "prefill_a": 0.025, "prefill_b": 4.5e-4, "prefill_c": 1.6e-7,
    "decode_a": 0.0182, "decode_b": 2.67e-6, "decode_c": 1.11e-3,
}  # fmt: skip
SEEDS = (1000, 1037)
DURATION_S = 30
TIMES = (1.0, 1.3, 1.7)
# Of the knee of the one instance with which a scaled fleet begins: one is enough, three are, and four are too few.
ELASTIC_TIMES = (1.0, 2.5, 4.5)
INSTANCE: Mapping[str, Any] = {
    "count": 2, "profile": A100, "kv_tokens": 262_144, "max_num_seqs": 64, "max_num_batched_tokens": 2048,
    "max_model_len": 16_384, "prefix_caching": False, "kv_bytes_per_token": 131_072,
}  # fmt: skip
LINKS = {"bandwidth_gb_s": 25, "latency_s": 0.002, "scope": "port"}
ELASTIC = {"min_instances": 1, "max_instances": 4, "sustain_s": 5, "cooldown_s": 3}
DEFAULT = "slackline"
KNEE = {"policy": "engine_priority_deadline"}
KNEE_OF_UNLIKE = {"policy": "hyperflexis"}  # the usual one sends what an instance cannot keep there, at any load


def slower(times: float) -> dict[str, float]:
    return {name: value * times for name, value in A100.items()}


def instances(count: int = 2, **changes: Any) -> dict[str, Any]:
    return {**INSTANCE, "count": count, **changes}


def disaggregated(prefill: int, decode: int) -> list[dict[str, Any]]:
    return [
        instances(prefill, role="prefill", max_num_batched_tokens=8192),
        instances(decode, role="decode", max_num_seqs=256),
    ]


def task(
    name: str, ttft_s: float, tpot_s: float, prompt: tuple[int, int], output: tuple[int, int], **more: Any
) -> dict[str, Any]:
    """`prompt` and `output`: mean and deviation in tokens, of a lognormal law."""
    lengths = [
        {"law": "lognormal", "mean": mean, "std": std, "low": 4, "high": 8 * mean} for mean, std in (prompt, output)
    ]
    return {"name": name, "ttft_s": ttft_s, "tpot_s": tpot_s, "prompt": lengths[0], "output": lengths[1], **more}


CHAT = task("chat", 1.0, 0.1, (300, 250), (120, 80))
LONG_PROMPTS = [task("documents", 4.0, 0.2, (1800, 1200), (60, 30)), CHAT]
LONG_ANSWERS = [task("essays", 2.0, 0.08, (200, 100), (600, 300)), CHAT]
# The targets of `talk` are the 95 % points of hardly used engines, so a few sequences more make steps too long for it.
TIGHT_PACE = [
    task("talk", 0.21, 0.0317, (144, 140), (55, 45)),
    task("answer", 4.0, 10.0, (144, 140), (55, 45)),
    task("step", 4.0, 10.0, (260, 200), (60, 60)),
]
# An instance that is three times as slow takes 0.074 s for a step alone, which is too long for `voice`.
SOME_KEEP = [task("voice", 0.6, 0.05, (150, 80), (60, 30)), task("documents", 6.0, 0.3, (1800, 1200), (60, 30)), CHAT]
# A step takes 0.0247 s alone, and a prompt 0.019 s and more: a fifth of the requests ask for less.
NOBODY_KEEPS = [
    task("blink", 0.012, 0.1, (150, 80), (60, 30), share=0.5),
    task("rush", 1.0, 0.02, (150, 80), (60, 30), share=0.5),
    {**CHAT, "share": 2.0},
    task("documents", 6.0, 0.3, (1800, 1200), (60, 30), share=2.0),
]
CACHED = [task("agents", 0.8, 0.1, (1600, 300), (60, 30), shared_prefix=1024), CHAT]


def policies(slots: int) -> list[Any]:
    """The default, and baselines at their best: windows are tried at half of the slots and at all of them."""
    windows = [
        {"name": name, "label": f"{name}_{window}", "overrides": {"pacing": {"window": window}}}
        for name in ("fcfs_window", "edf_window")
        for window in (max(1, slots // 2), slots)
    ]
    return [
        DEFAULT, "round_robin", "least_outstanding", "engine_priority_class", "engine_priority_deadline", "scorpio",
        "aladdin", "hyperflexis", *windows,
    ]  # fmt: skip


def cell(
    name: str,
    fleet: Any,
    tasks: Any = "4-task",
    slots: int = 64,
    knee: Mapping[str, Any] = KNEE,
    **settings: Any,
) -> dict[str, Any]:
    """`knee`: of which policy at which attainment, where the usual one is at no load or cannot be had."""
    times = ELASTIC_TIMES if "elastic" in settings else TIMES
    workload = {"kind": "mix", "mix": tasks} if isinstance(tasks, str) else {"kind": "tasks", "tasks": tasks}
    return {
        "name": name,
        "instances": fleet,
        "policies": policies(slots),
        "seeds": list(SEEDS),
        "knee": {**knee, "times": list(times)},
        "settings": {"cutoff_s": 25.0, "network_s": 0.001, **settings},
        "workload": {**workload, "duration_s": DURATION_S},
    }


def cells() -> dict[str, dict[str, Any]]:
    """Experiments by the name of their file."""
    two_models = [instances(1, model="small"), instances(1, model="large", profile=slower(2.0))]
    of_two = [{**CHAT, "name": "small_chat", "model": "small"}, {**CHAT, "name": "large_chat", "model": "large"}]
    changing = [
        instances(1), instances(1, until_s=10.0), instances(1, from_s=10.0), instances(1, profile=slower(2), from_s=5.0)
    ]  # fmt: skip
    found = {
        f"slots_{slots}": cell(f"{slots} sequences an instance", instances(max_num_seqs=slots), slots=slots)
        for slots in (8, 32, 64, 256)
    }
    found |= {f"gateways_{count}": cell(f"{count} gateways", instances(), gateways=count) for count in (2, 4)}
    found |= {
        "two_tasks": cell("the 2-task mix", instances(), "2-task"),
        "two_tasks_256": cell("the 2-task mix, 256 sequences", instances(max_num_seqs=256), "2-task", 256),
        "one_instance": cell("one instance", instances(1)),
        "mixed": cell("one instance twice as slow", [instances(1, profile=slower(2.0)), instances(1)]),
        "mixed_256": cell(
            "one instance four times as slow, 256 sequences",
            [instances(1, profile=slower(4.0), max_num_seqs=256), instances(1, max_num_seqs=256)],
            slots=256,
        ),
        "changing": cell("instances come and go", changing),
        "unprofiled": cell("nobody profiled the instances", instances(profiled=False)),
        "wrong_profile": cell("profiles twice too slow", instances(believed=slower(2.0))),
        "two_models": cell("two models", two_models, of_two),
        "long_prompts": cell("long prompts", instances(), LONG_PROMPTS),
        "long_answers": cell("long answers", instances(), LONG_ANSWERS),
        "tight_pace": cell(
            "a TPOT that a few sequences more miss",
            instances(profile=VLLM_CPU, max_num_seqs=32, kv_tokens=65_536, max_model_len=4096), TIGHT_PACE, 32,
        ),
        "cached_prefixes": cell("prompts that share a prefix", instances(prefix_caching=True), CACHED),
        "mixed_tight": cell(
            "a TPOT that one of three instances cannot keep",
            [instances(1, profile=slower(3.0)), instances(2)], SOME_KEEP, knee=KNEE_OF_UNLIKE,
        ),
        "kept_by_nobody": cell(
            "targets that no instance keeps for a fifth of the requests",
            instances(), NOBODY_KEEPS, knee={**KNEE, "level": 0.72},
        ),
        "unprofiled_gateways": cell("no profile, two gateways", instances(profiled=False), LONG_PROMPTS, gateways=2),
    }  # fmt: skip
    found |= scaled()
    for prefill, decode in ((1, 1), (1, 3), (3, 1)):
        found[f"disaggregated_{prefill}_{decode}"] = cell(
            f"{prefill} prefill and {decode} decode instances", disaggregated(prefill, decode), links=LINKS
        )
    found["disaggregated_gateways_2"] = cell(
        "a prefill and a decode instance, two gateways", disaggregated(1, 1), links=LINKS, gateways=2
    )
    prefills, quick = disaggregated(3, 1)
    found["disaggregated_unlike"] = cell(
        "decode instances of which one is three times as slow",
        [prefills, {**quick, "profile": slower(3.0)}, quick], SOME_KEEP, knee=KNEE_OF_UNLIKE, links=LINKS,
    )  # fmt: skip
    prefills, decodes = disaggregated(2, 2)
    decodes |= {"max_num_seqs": 16, "first_token_with_kv": False}  # vLLM and SGLang; few slots, so that they are scarce
    found["disaggregated_in_a_slot"] = cell(
        "decode instances that compute the first token in a slot", [prefills, decodes], links=LINKS
    )
    return found


def scaled() -> dict[str, dict[str, Any]]:
    """Fleets that a scaler changes."""
    return {
        "elastic": cell("a scaler between one and four instances", instances(1), elastic=ELASTIC),
        "elastic_mixed": cell(
            "a scaler, long prompts and 256 sequences",
            instances(1, max_num_seqs=256), LONG_PROMPTS, 256, elastic=ELASTIC,
        ),
        "elastic_unlike": cell(
            "a scaler, and one of two instances twice as slow",
            [instances(1), instances(1, profile=slower(2.0))], elastic=ELASTIC,
        ),
        "elastic_gateways_2": cell("a scaler, two gateways", instances(1), elastic=ELASTIC, gateways=2),
        "elastic_disaggregated": cell(
            "a scaler for each stage", disaggregated(1, 1), links=LINKS, elastic={**ELASTIC, "decode": ELASTIC}
        ),
    }  # fmt: skip


def text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=1) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, config in cells().items():
        (FOLDER / f"{name}.json").write_text(text(config))
    print(f"{len(cells())} experiments")


if __name__ == "__main__":
    main()
