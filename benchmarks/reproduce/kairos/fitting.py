"""What Kairos' paper leaves open, fitted to what it publishes of DistServe, and to nothing that it publishes of Kairos.

Two stages, because first tokens do not depend on decode: the tail of the prompts by TTFT attainment (first come, first
served on one engine: a recursion), then, for the best tail of each length, the KV capacity, the cost of a sequence and
the length of answers by TPOT attainment, attainment of both, and decode speed.
`python -m benchmarks.reproduce --paper kairos --part fit` stores both tables; the second has the constants of `setting`
beside the candidates.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.reproduce.claims import Table, Value
from benchmarks.reproduce.kairos import setting
from benchmarks.reproduce.kairos.gains import PAPER
from benchmarks.reproduce.kairos.setting import DISTSERVE, PAIRS, Figures, TaskLengths
from benchmarks.reproduce.kairos.stages import Stages, Testbed

SEEDS = (11, 12, 13)  # none of the comparison's
DECODE_SEED = 11
SIGMAS, LONGEST = (0.8, 1.1, 1.45, 1.8), (16_384, 32_768, 65_536, 131_072)
CAPACITIES = tuple(round(2.8 + 0.1 * step, 1) for step in range(9))  # requests/s of the prefill engine
KV_TOKENS = (1_000_000, 2_000_000)  # with less, decode never catches up
COSTS_S = (1.5e-4, 1.8e-4, 2.1e-4, 2.5e-4)
OUTPUTS, POWERS = (240, 350), (0.7, 1.0)
TAILS = (65_536, 131_072)  # of LONGEST, for the second stage: the longest sequence sets the pace of decode
DECODE_RATES = (2.0, 3.0, 5.0)
TTFT = {2.0: 100.0, **PAPER["ttft"][DISTSERVE]}  # "100 % at QPS 2.8 and below"
DECODE: Mapping[str, Mapping[float, float]] = {
    "tpot": {**PAPER["tpot"][DISTSERVE], 5.0: 67.0},  # "between 60 and 74 % regardless of load": its middle
    "e2e": {3.0: PAPER["e2e"][DISTSERVE][3.0]},
    "throughput": PAPER["throughput"][DISTSERVE],
}
SHOWN = 8  # rows of a table


class Tail(NamedTuple):
    """A candidate of the first stage, its TTFT attainment by QPS, and the root of its mean squared error, points."""

    sigma: float
    longest: int
    capacity: float
    median: float
    attained: Mapping[float, float]
    error: float


class FittedDecoder(NamedTuple):
    """A candidate of the second stage. `error`: over all values, in points and in per cent of a speed."""

    bed: Testbed
    lengths: TaskLengths
    values: Mapping[str, Mapping[float, float]]
    error: float


def tails() -> list[Tail]:
    """All candidates, the best first."""
    found = []
    for sigma, longest, capacity in itertools.product(SIGMAS, LONGEST, CAPACITIES):
        median = _median(sigma, longest, capacity)
        service = _service(setting.quantiles(TaskLengths(median, sigma, longest)))
        attained = {qps: statistics.fmean(_ttft(service, qps, seed) for seed in SEEDS) for qps in TTFT}
        found.append(Tail(sigma, longest, capacity, median, attained, _error([*attained.values()], [*TTFT.values()])))
    return sorted(found, key=lambda tail: tail.error)


def _service(prompts: np.ndarray) -> np.ndarray:
    latency = setting.ANCHORS
    return latency.prefill_b * prompts + latency.prefill_c * prompts**2


def _median(sigma: float, longest: int, capacity: float) -> float:
    """The median with which the prefill engine serves `capacity` requests/s."""
    low, high = 100.0, 60_000.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        fast = 1 / _service(setting.quantiles(TaskLengths(middle, sigma, longest))).mean() > capacity
        low, high = (middle, high) if fast else (low, middle)
    return float(round(low))


def _ttft(service: np.ndarray, qps: float, seed: int) -> float:
    """Per cent of first tokens in time, first come, first served."""
    rng = np.random.default_rng(seed)
    took = np.cumsum(rng.permutation(service))
    arrived = np.cumsum(rng.exponential(1 / qps, len(service)))
    began_at_least = np.concatenate(([0.0], took[:-1]))
    done = took + np.maximum.accumulate(arrived - began_at_least)
    return float(100 * np.mean(done - arrived <= setting.TTFT_S))


def decoders(found: Sequence[Tail], progress: Callable[[str], None] = print) -> list[FittedDecoder]:
    """All candidates with the best tails of the first stage, the best first."""
    best = [next(tail for tail in found if tail.longest == longest) for longest in TAILS]
    made = []
    for tail, power, outputs, cost_s, kv_tokens in itertools.product(best, POWERS, OUTPUTS, COSTS_S, KV_TOKENS):
        bed = replace(
            setting.TESTBED, chunk=8_192, kv_tokens=kv_tokens, decode_slots=256,
            latency=setting.ANCHORS._replace(decode_c=cost_s),
        )  # fmt: skip
        made.append(_decoder(bed, TaskLengths(tail.median, tail.sigma, tail.longest, outputs, power)))
    progress(f"{len(made)} candidates of decode")
    return sorted(made, key=lambda decoder: decoder.error)


def in_use() -> FittedDecoder:
    """The constants of `setting`, by the same points."""
    return _decoder(replace(setting.TESTBED, chunk=8_192, decode_slots=256), TaskLengths())


def _decoder(bed: Testbed, lengths: TaskLengths) -> FittedDecoder:
    runs = {
        qps: Figures(Stages(bed, *PAIRS[DISTSERVE]).run(setting.long_tail(qps, DECODE_SEED, lengths=lengths)))
        for qps in DECODE_RATES
    }
    values = {key: {qps: float(getattr(runs[qps], key)) for qps in points} for key, points in DECODE.items()}
    pairs = [(key, values[key][qps], value) for key, points in DECODE.items() for qps, value in points.items()]
    ours = [100 * mine / value if key == "throughput" else mine for key, mine, value in pairs]
    theirs = [100.0 if key == "throughput" else value for key, _, value in pairs]
    return FittedDecoder(bed, lengths, values, _error(ours, theirs))


def _error(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.fmean((mine - value) ** 2 for mine, value in zip(ours, theirs, strict=True)) ** 0.5


def table_of_tails(found: Sequence[Tail]) -> Table:
    rows: list[list[Value]] = [
        [each.sigma, each.longest, each.capacity, each.median, *(round(v, 1) for v in each.attained.values()),
         round(each.error, 1)]
        for each in found[:SHOWN]
    ]  # fmt: skip
    rows.append(["paper", None, None, None, *TTFT.values(), None])
    shares = (f"TTFT % at {qps:g}" for qps in TTFT)
    columns = ["sigma", "longest prompt", "requests/s of the engine", "median prompt", *shares,
               "error, points"]  # fmt: skip
    return Table(f"Prompts fitted to DistServe's TTFT: the best {SHOWN} of {len(found)}", columns, rows)


def table_of_decoders(found: Sequence[FittedDecoder]) -> Table:
    names = {"tpot": "TPOT %", "e2e": "both %", "throughput": "tokens/s"}
    rows: list[list[Value]] = []
    for name, each in [*((str(place + 1), each) for place, each in enumerate(found[:SHOWN])), ("in use", in_use())]:
        shares = (round(value, 1) for points in each.values.values() for value in points.values())
        lengths = each.lengths
        rows.append(
            [name, lengths.longest, lengths.outputs, lengths.power, round(1000 * each.bed.latency.decode_c, 2),
             each.bed.kv_tokens, *shares, round(each.error, 1)]
        )  # fmt: skip
    published = (value for points in DECODE.values() for value in points.values())
    rows.append(["paper", None, None, None, None, None, *published, None])
    heads = (f"{names[key]} at {qps:g}" for key, points in DECODE.items() for qps in points)
    columns = ["candidate", "longest prompt", "answer at a prompt of 2,200", "grows with its power",
               "cost of a sequence, ms", "KV tokens", *heads, "error"]  # fmt: skip
    return Table(f"Decode fitted to DistServe's points: the best {SHOWN} of {len(found)}", columns, rows)
