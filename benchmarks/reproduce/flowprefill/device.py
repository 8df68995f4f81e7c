"""FlowPrefill, Fig. 12, 13 and 15 and the cost of sec. 6.4 with what was measured on one GPU.

The measurements are stored in the tree: `benchmarks.bench_preempt --device cuda --shape llama-8b` with prompts of 8,192
tokens, `benchmarks.torch.profile` and `benchmarks.torch.operators`. Fig. 15 is simulated with times of the last two.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine.names import MEASUREMENTS
from benchmarks.reproduce.claims import Claim, Progress, Table
from benchmarks.reproduce.flowprefill.compatibility import with_chunks
from benchmarks.reproduce.flowprefill.setting import MODELS, PAPER, FlowPrefillModel, PrefillBench, SectionPart, Size
from controller.predict.operator_profile import OPERATORS, read_operator_profile
from controller.simulator import __file__ as simulator
from workers.engine.profiles import SHIPPED, load_profile

MACHINE = "intel-xeon-processor-16-cores-nvidia-h100-80gb-hbm3"
PROFILE = "llama-8b-nvidia-h100-80gb-hbm3"
SAMPLE = Path(simulator).parent / "samples" / "operators_llama_8b_h100.json"
NAME = "one H100"
LONGEST = 2020  # tokens of the longest prompt of the profile
MOST_COST_PCT = 2.0  # our bar: what the checks may cost


def h100() -> FlowPrefillModel:
    """Llama-3.1-8B's shape on the reference engine's PyTorch executor.

    No prompt of the profile is longer than 2,020 tokens, so its fit has no attention of long ones. The operators have:
    chunks of one size with more and more cached before them. Prompts of 2,020 tokens take what the profile says.
    """
    profile, raw = load_profile(PROFILE), json.loads(SAMPLE.read_text())
    square_s = raw["layers"] * attention_square_s(raw["rows"])
    latency = profile.coefficients
    latency = latency._replace(prefill_b=latency.prefill_b - square_s * LONGEST, prefill_c=latency.prefill_c + square_s)
    return replace(
        MODELS["Llama3-8B"],
        latency=latency,
        kv_tokens=profile.kv_capacity_tokens or MODELS["Llama3-8B"].kv_tokens,
        profile=f"measured on {NAME}",
        operators=read_operator_profile(raw, raw["layers"]),
    )


def attention_square_s(rows: Sequence[Mapping[str, float]]) -> float:
    """Seconds of a layer's attention for each square of eq. 1: the median over chunks with a cached past."""
    alone = {row["tokens"]: row["attn"] for row in rows if not row["past"]}
    return statistics.median(
        (row["attn"] - alone[row["tokens"]]) / (2 * row["tokens"] * row["past"]) for row in rows if row["past"]
    )


def on_device(bench: PrefillBench, size: Size, progress: Progress) -> SectionPart:
    measured = json.loads((MEASUREMENTS / "preempt" / f"{MACHINE}.json").read_text())
    chunks = with_chunks(bench, size, progress, h100(), NAME)
    return SectionPart([*_blocking(measured), _prediction(), *chunks.claims], [_table(measured), *chunks.tables], [])


def _blocking(measured: Mapping[str, Any]) -> list[Claim]:
    setting = measured["setting"]
    where = f"bench-preempt: {setting['shape']}, {setting['dtype']}, prompts of {setting['tokens']:,} tokens, {NAME}"
    mean, ratio = measured["blocking_ms"]["operator"]["mean"], measured["ratio_to_operator"]["layer"]
    cost, seeds = measured["throughput_cost_pct"], [setting["seed"]]
    lengths = [measured["operator_ms"][name] for name in OPERATORS]
    reason = (
        "one operator is queued on the device behind the running one, so that the device never waits for the host, and "
        f"a signal waits for both: {ratio['predicted']:.2f} is predicted. From the same lengths of operators with "
        f"none queued it would be {sum(lengths) ** 2 / sum(each * each for each in lengths):.2f}"
    )
    blocking, ratio_of = "mean blocking time at operators", "blocking time at layers over that at operators"
    most, checks = MOST_COST_PCT, "time of a prefill with checks at every operator, change"
    steep = ratio["measured"]
    return [
        _claim("Fig. 12", f"{blocking}, measured on {NAME} (ms)", 4.5, mean, where, seeds, mean <= 4.5),
        _claim("Fig. 12", f"{ratio_of}, measured on {NAME} (factor)", 3.5, steep, where, seeds, steep >= 3.5, reason),
        replace(
            _claim("Sec. 6.4", f"{checks}, on {NAME} (%)", most, cost, where, seeds, cost <= most),
            theirs=None,
            bar=most,
        ),
    ]


def _claim(
    figure: str,
    text: str,
    theirs: float | None,
    ours: float,
    setting: str,
    seeds: Sequence[int],
    reached: bool | None,
    reason: str = "",
) -> Claim:
    return Claim(PAPER, figure, text, theirs, round(ours, 3), reached, setting, seeds, reason)


def _prediction() -> Claim:
    profile = next(each for each in json.loads(SHIPPED.read_text())["profiles"] if PROFILE in each["aliases"])
    reason = (
        f"{profile['prefill']['domain']}; four points of many short prompts are left out as outliers. A step of fewer "
        "tokens takes as long as the host needs to queue its operators, which the line of the fit cannot say"
    )
    text = f"real against predicted time of a prefill step on {NAME}, median error (%)"
    error = 100 * profile["prefill"]["median_rel_err"]
    return _claim("Fig. 13", text, None, error, profile["source"], [1], None, reason)


def _table(measured: Mapping[str, Any]) -> Table:
    columns = ["mean", "p50", "p99", "predicted_mean", "predicted_p50", "predicted_p99", "signals"]
    titles = ["boundary", *(name.replace("_", " ") + ("" if name == "signals" else ", ms") for name in columns)]
    rows = [[kind, *(row[name] for name in columns)] for kind, row in measured["blocking_ms"].items()]
    return Table(f"Fig. 12: blocking time, measured on {NAME}", titles, rows)
