"""Kairos' setting: its hardware anchors, its long-tailed workload, and the compared policies (paper sec. 4.1)."""

from __future__ import annotations

import csv
import gzip
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from benchmarks.reproduce.kairos.stages import StageCall, StageOutcome, StagePolicy, Testbed
from controller.core.types import LatencyCoefficients

TTFT_S, TPOT_S = 8.0, 0.05
REQUESTS = 1000
MEDIAN, SIGMA, SHORTEST, LONGEST = 1_950, 1.45, 32, 131_072
OUTPUT_MEAN, OUTPUT_POWER, OUTPUT_SIGMA, LONGEST_OUTPUT = 240, 0.7, 0.8, 8_000
PER_SEQUENCE_S = 1.8e-4  # of the costs in `fitting.py`, that of its best candidate for decode
# 8K and 128K tokens prefill in 0.4004 and 8.8 s, decode at batch 1 in 11.0 and 40.3 ms (sec. 2.2; worked example K8).
ANCHORS = LatencyCoefficients(0.0, 4.76595e-5, 1.48614e-10, 9.04667e-3, 2.38444e-7, PER_SEQUENCE_S)
TESTBED = Testbed(ANCHORS, chunk=8_192, kv_tokens=2_000_000, decode_slots=128, ttft_s=TTFT_S, tpot_s=TPOT_S)
MOONCAKE = Path(__file__).resolve().parents[2] / "data" / "mooncake_conversation_1000.csv.gz"


class Constant(NamedTuple):
    """One number of the testbed, and where it is from."""

    name: str
    value: str
    source: str


FIRST_TOKENS = "fitted to DistServe's TTFT attainment"
DECODES = "fitted to DistServe's TPOT attainment, attainment of both and decode speed"
CONSTANTS = (
    Constant("targets", f"{TTFT_S:g} s to the first token, {1000 * TPOT_S:g} ms a token", "the paper, section 4.1"),
    Constant("prefill, a token and its square", f"{ANCHORS.prefill_b:g} s, {ANCHORS.prefill_c:g} s",
             "the paper, section 2.2: 8K tokens in 0.4004 s, 128K in 8.8 s (K8)"),
    Constant("decode step, and each token of its longest sequence",
             f"{1000 * ANCHORS.decode_a:.2f} ms, {1e6 * ANCHORS.decode_b:.3f} us",
             "the paper, section 2.2: 11.0 ms at 8K tokens, 40.3 ms at 128K (K8)"),
    Constant("decode step, each sequence", f"{1000 * PER_SEQUENCE_S:.2f} ms", DECODES),
    Constant("prompts, median and sigma", f"{MEDIAN:,}, {SIGMA:g}", FIRST_TOKENS),
    Constant("longest prompt", f"{LONGEST:,}", f"{DECODES}; the paper speaks of prompts of 128K"),
    Constant("shortest prompt", f"{SHORTEST}", "ours: two of 1,000 prompts would be shorter"),
    Constant("answers, at a prompt of 2,200, growing with its power", f"{OUTPUT_MEAN}, {OUTPUT_POWER:g}", DECODES),
    Constant("answers, sigma of their noise, and the longest", f"{OUTPUT_SIGMA:g}, {LONGEST_OUTPUT:,}",
             "ours, fitted to nothing"),
    Constant("KV tokens of the decode engine", f"{TESTBED.kv_tokens:,}", f"{DECODES}; no request waits for them"),
    Constant("KV tokens a second of the link", f"{TESTBED.link_tokens_per_s:,.0f}",
             "ours, fitted to nothing: a prompt of the median length moves in a millisecond"),
    Constant("requests of a run", f"{REQUESTS:,}", "ours; by three seeds"),
    Constant("prefill batch, decode slots", "each policy's own",
             "the best of a sweep for each policy by what it attains, at QPS 3 and two seeds of its own"),
)  # fmt: skip

_QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / REQUESTS) for i in range(REQUESTS)])


class TaskLengths(NamedTuple):
    """Tokens of the workload. `outputs`: the mean answer at a prompt of 2,200, growing with the prompt to `power`."""

    median: float = MEDIAN
    sigma: float = SIGMA
    longest: int = LONGEST
    outputs: float = OUTPUT_MEAN
    power: float = OUTPUT_POWER


def quantiles(lengths: TaskLengths) -> np.ndarray:
    """Prompt lengths, ascending."""
    return np.clip(lengths.median * np.exp(lengths.sigma * _QUANTILES), SHORTEST, lengths.longest)


def long_tail(rate: float, seed: int, count: int = REQUESTS, lengths: TaskLengths | None = None) -> list[StageCall]:
    """A trace of fixed lengths in an order that depends on the seed, with Poisson arrivals at `rate`/s.

    Prompts are the 1,000 quantiles of a lognormal distribution, clipped. Outputs grow with the prompt (an agent's long
    contexts have long answers), with lognormal noise. Quantiles are used in place of draws, because the tail is a
    handful of requests.
    """
    given = TaskLengths() if lengths is None else lengths
    rng = np.random.default_rng(seed)
    prompts = rng.permutation(quantiles(given))
    noise = np.exp(OUTPUT_SIGMA * rng.permutation(_QUANTILES) - OUTPUT_SIGMA**2 / 2)
    outputs = np.clip(given.outputs * (prompts / 2_200) ** given.power * noise, 2, LONGEST_OUTPUT)
    return _calls(rate, rng, prompts[:count], outputs[:count])


def mooncake(rate: float, seed: int, count: int = REQUESTS, path: Path = MOONCAKE) -> list[StageCall]:
    """Lengths of the first requests of a recorded trace, Poisson arrivals. Raises FileNotFoundError."""
    with gzip.open(path, "rt", newline="") as file:
        rows = [
            (float(r["input_tokens"]), float(r["output_tokens"]))
            for r, _ in zip(csv.DictReader(file), range(count), strict=False)
        ]
    lengths = np.array(rows)
    return _calls(rate, np.random.default_rng(seed), np.minimum(lengths[:, 0], LONGEST), np.maximum(lengths[:, 1], 2))


def _calls(rate: float, rng: np.random.Generator, prompts: np.ndarray, outputs: np.ndarray) -> list[StageCall]:
    at = np.cumsum(rng.exponential(1 / rate, len(prompts)))
    return [StageCall(float(a), int(p), int(o)) for a, p, o in zip(at, prompts, outputs, strict=True)]


def work_s(calls: Sequence[StageCall]) -> float:
    """Mean prefill seconds of a request alone."""
    return statistics.fmean(ANCHORS.prefill_b * c.prompt_tokens + ANCHORS.prefill_c * c.prompt_tokens**2 for c in calls)


# ---- policies --------------------------------------------------------------------------------------------------------

_TABLE = {
    "decode_a": ANCHORS.decode_a,
    "decode_b": ANCHORS.decode_b,
    "decode_c": ANCHORS.decode_c,
    "profile": "longest",
}
FCFS = StagePolicy("chunked_prefill")
CONTINUOUS = StagePolicy("chunked_prefill")
URGENCY, URGENCY_PRINTED = StagePolicy("kairos_urgency"), StagePolicy("kairos_urgency_printed")
S_EDF = StagePolicy("slo_aware_batching", {"prefill_a": 0.0, "prefill_b": 1 / 15_000, "batch_tokens": 8_192})
SLACK, SLACK_ACTIVE, SLACK_PRINTED = (
    StagePolicy("kairos_decode", {**_TABLE, "reserve": reserve}) for reserve in ("longest", "active", "solo")
)

DISTSERVE, KAIROS, KAIROS_PRINTED = "DistServe (FCFS)", "Kairos, as read", "Kairos, as printed"
PREFILL_ALONE, DECODE_ALONE = "urgency prefill alone", "slack decode alone"
PAIRS: Mapping[str, tuple[StagePolicy, StagePolicy]] = {
    DISTSERVE: (FCFS, CONTINUOUS),
    KAIROS: (URGENCY, SLACK),
    KAIROS_PRINTED: (URGENCY_PRINTED, SLACK_PRINTED),
    PREFILL_ALONE: (URGENCY, CONTINUOUS),
    DECODE_ALONE: (FCFS, SLACK),
    "printed urgency alone": (URGENCY_PRINTED, CONTINUOUS),
    "slack decode alone, reserving a solo step": (FCFS, SLACK_PRINTED),
    "slack decode alone, reserving the active set": (FCFS, SLACK_ACTIVE),
    "S-EDF prefill (FlowPrefill), slack decode": (S_EDF, SLACK),
}


class Figures:
    """Figures of one run: attainment in per cent, median decode tokens/s of a request, longest TTFT in seconds."""

    __slots__ = ("e2e", "longest_ttft_s", "throughput", "tpot", "ttft")

    def __init__(self, outcomes: Sequence[StageOutcome]) -> None:
        first = [each.ttft_s <= TTFT_S for each in outcomes]
        pace = [each.tpot_s <= TPOT_S for each in outcomes]
        self.ttft = 100 * statistics.fmean(first)
        self.tpot = 100 * statistics.fmean(pace)
        self.e2e = 100 * statistics.fmean(a and b for a, b in zip(first, pace, strict=True))
        self.throughput = statistics.median(1 / each.tpot_s for each in outcomes if each.tpot_s > 0)
        self.longest_ttft_s = max(each.ttft_s for each in outcomes)
