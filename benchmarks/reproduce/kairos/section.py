"""Kairos (Figures 3 to 6): urgency-based prefill and slack-guided decode against DistServe, QPS 2 to 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import Plot, Progress, Section, Table
from benchmarks.reproduce.kairos.gains import (
    FIGURES,
    LEVEL,
    NAMES,
    PAPER,
    Curves,
    claims,
    equal_loads,
    knee,
    median,
    table_of_gains,
    times_knee,
)
from benchmarks.reproduce.kairos.setting import (
    DISTSERVE,
    KAIROS,
    KAIROS_PRINTED,
    PAIRS,
    TESTBED,
    Figures,
    long_tail,
    mooncake,
    work_s,
)
from benchmarks.reproduce.kairos.stages import StageCall, Stages, Testbed

RATES = (2.0, 2.4, 2.8, 3.0, 3.2, 3.4, 4.0, 5.0)
ABLATION_RATES = (2.0, 3.0, 3.4)
SEEDS = (1, 2, 3)
MAIN = (DISTSERVE, KAIROS, KAIROS_PRINTED)
BASELINES = (  # prefill tokens per step, decode slots
    (1_024, 128), (2_048, 128), (4_096, 128), (8_192, 128), (16_384, 128), (131_072, 128), (8_192, 32), (8_192, 64),
    (8_192, 256),
)  # fmt: skip


def curve(
    name: str,
    rates: Sequence[float],
    seeds: Sequence[int],
    bed: Testbed,
    calls: Callable[[float, int], list[StageCall]],
) -> dict[float, list[Figures]]:
    return {rate: [Figures(Stages(bed, *PAIRS[name]).run(calls(rate, seed))) for seed in seeds] for rate in rates}


def table_of_paper(curves: Curves, point: float | None) -> Table:
    """`point`: DistServe's 90 % TTFT point, from the rates that normalise the paper's loads."""
    rows: list[list[str | float | None]] = []
    for key, by_policy in PAPER.items():
        for policy, points in by_policy.items():
            for rate, theirs in points.items():
                if rate in curves[policy]:
                    normal = None if point is None else round(rate / point, 2)
                    rows.append(
                        [
                            FIGURES[key],
                            NAMES[key],
                            policy,
                            rate,
                            normal,
                            theirs,
                            round(median(curves[policy][rate], key), 1),
                        ]
                    )
    columns = ["figure", "what", "policy", "QPS", "of DistServe's 90 % TTFT point", "paper", "ours"]
    return Table("The paper's figures in its text, and ours at the same QPS", columns, rows)


def table_of_curves(curves: Curves, point: float | None) -> Table:
    rows: list[list[str | float | None]] = []
    for name, by_rate in curves.items():
        for rate, of in sorted(by_rate.items()):
            values = [round(median(of, key), 1) for key in ("ttft", "tpot", "e2e", "throughput", "longest_ttft_s")]
            spread = f"{min(f.e2e for f in of):.1f}-{max(f.e2e for f in of):.1f}"
            rows.append([name, rate, None if point is None else round(rate / point, 2), *values, spread])
    columns = [
        "policies", "QPS", "of the 90 % point", "TTFT %", "TPOT %", "both %", "tokens/s", "longest TTFT, s", "spread",
    ]  # fmt: skip
    return Table("All runs, medians over seeds; single mechanisms included", columns, rows)


def best_baseline(
    rate: float, seeds: Sequence[int], calls: Callable[[float, int], list[StageCall]]
) -> tuple[Testbed, Table]:
    """DistServe with settings of its own (size of a prefill batch, sequences per decode batch), and the whole sweep.

    The best meets both targets most often, then TTFT.
    """
    rows: list[list[str | float | None]] = []
    scored: list[tuple[float, float, Testbed]] = []
    for chunk, slots in BASELINES:
        bed = replace(TESTBED, chunk=chunk, decode_slots=slots)
        of = curve(DISTSERVE, [rate], seeds, bed, calls)[rate]
        rows.append([chunk, slots, *(round(median(of, key), 1) for key in ("ttft", "tpot", "e2e", "throughput"))])
        scored.append((median(of, "e2e"), median(of, "ttft"), bed))
    best = max(scored, key=lambda each: each[:2])[2]
    columns = ["prefill tokens a step", "decode slots", "TTFT %", "TPOT %", "both %", "tokens/s"]
    title = f"DistServe's own settings at QPS {rate:g}: the comparison uses {best.chunk:,} and {best.decode_slots}"
    return best, Table(title, columns, rows)


def calibration(bed: Testbed, seeds: Sequence[int], calls: Callable[[float, int], list[StageCall]]) -> Table:
    """DistServe with several costs of a sequence in a decode batch, which the paper does not give."""
    rows: list[list[str | float | None]] = []
    for cost_s in (1.5e-4, 1.8e-4, 2.2e-4):
        costed = replace(bed, latency=bed.latency._replace(decode_c=cost_s))
        by_rate = curve(DISTSERVE, (2.0, 3.0, 5.0), seeds, costed, calls)
        paces = [round(median(by_rate[rate], "tpot"), 1) for rate in (2.0, 3.0, 5.0)]
        rows.append(
            [f"{1000 * cost_s:.2f} ms", *paces, *(round(median(by_rate[r], "throughput"), 1) for r in (2.0, 5.0))]
        )
    rows.append(["paper", 73.7, 62.5, "60-74", 23.6, 20.9])
    columns = ["cost of a sequence", "TPOT % at 2", "at 3", "at 5", "tokens/s at 2", "at 5"]
    return Table("DistServe by the cost of a sequence: 0.18 ms was chosen", columns, rows)


def other_cost(
    beds: Mapping[str, Testbed],
    rates: Sequence[float],
    seeds: Sequence[int],
    calls: Callable[[float, int], list[StageCall]],
) -> Table:
    """The same with the cost of a decode step as a sum over its sequences instead of its longest one."""
    rows: list[list[str | float | None]] = []
    for decode_by in ("longest", "sum"):
        for name in (DISTSERVE, KAIROS):
            bed = replace(beds.get(name, TESTBED), decode_by=decode_by)
            for rate, of in curve(name, rates, seeds, bed, calls).items():
                rows.append(
                    [
                        decode_by,
                        name,
                        rate,
                        *(round(median(of, key), 1) for key in ("ttft", "tpot", "e2e", "throughput")),
                    ]
                )
    columns = ["a decode step costs by its", "policies", "QPS", "TTFT %", "TPOT %", "both %", "tokens/s"]
    return Table("Influence of the pace of the longest sequence", columns, rows)


def on_mooncake(beds: Mapping[str, Testbed], seeds: Sequence[int], count: int) -> Table:
    """A recorded long-tailed trace (mean prompt 12,000 tokens) at shares of one prefill engine's capacity."""
    work = work_s(mooncake(1.0, 1, count))
    rows: list[list[str | float | None]] = []
    for name in MAIN:
        for share in (0.7, 0.9, 1.1):
            bed = beds.get(name, TESTBED)
            of = curve(name, [share / work], seeds, bed, lambda rate, seed: mooncake(rate, seed, count))[share / work]
            rows.append(
                [
                    name,
                    share,
                    round(share / work, 2),
                    *(round(median(of, key), 1) for key in ("ttft", "tpot", "e2e", "throughput")),
                ]
            )
    columns = ["policies", "load", "QPS", "TTFT %", "TPOT %", "both %", "tokens/s"]
    return Table("The same on the Mooncake conversation trace (lengths; Poisson arrivals)", columns, rows)


def plots(curves: Curves) -> list[Plot]:
    made = []
    for key, name in NAMES.items():
        series = {label: [(rate, median(of, key)) for rate, of in sorted(curves[label].items())] for label in MAIN}
        series |= {f"{label}, paper": sorted(points.items()) for label, points in PAPER[key].items()}
        level = LEVEL if key != "throughput" else None
        made.append(Plot(f"kairos_{key}", f"Kairos, {FIGURES[key]}", "requests/s", name, series, level))
    return made


SETTINGS = """
Paper: MiniMax-M2.5 (229B, FP8) on 8 H200: four GPUs for prefill and four for decode, each one
tensor-parallel group, so one prefill engine and one decode engine; here two engine schedulers on
virtual time (`stages.py`), with KV over a link of two million tokens/s. Latency from the paper's
anchors (worked example K8). A decode step costs 9.05 ms, 0.238 us for each token of its *longest*
sequence, as the paper has it, and 0.18 ms a sequence.

The online trace is not public. Lengths: 1,000 quantiles of a lognormal law (median 1,950, sigma 1.45,
clipped to 32 to 131,072: mean about 5,500), outputs 240 x (prompt / 2,200)^0.7 with lognormal noise
(sigma 0.8), Poisson arrivals; the seed draws order and arrivals. Values that the paper does not give
(these outputs, the cost of a sequence, a KV cache of two million tokens) were chosen so that
*DistServe* comes near the paper's DistServe; a table shows the costs that were tried.

*As read* is `kairos_urgency`, and `kairos_decode` that reserves a step of the active set; *as printed*
is `kairos_urgency_printed`, with a solo step reserved. All requests are of one class, so an engine's
own priority by class, or by deadline, is first come, first served, which is DistServe's order. S-EDF is
shown as the strongest other order.

The paper's largest gains are at QPS 3.0 (Figure 6: 2.0), which is {over:.2f} ({under:.2f}) times the load at
which its DistServe holds 90 % of TTFTs. Claims are judged at that multiple of our DistServe's own 90 %
TTFT point; the same QPS and the largest gain at any load are shown beside it. This paper runs in an
event loop of its own around the engine schedulers that serve, since its decode step takes as long as
its longest sequence needs.
"""


def reproduce(progress: Progress, quick: bool) -> Section:
    """About ten minutes; with `quick` a few seconds on a fifth of the requests, at three loads and one seed."""
    seeds = SEEDS[:1] if quick else SEEDS
    rates = ABLATION_RATES if quick else RATES
    count = 200 if quick else 1000

    def calls(rate: float, seed: int) -> list[StageCall]:
        return long_tail(rate, seed, count)

    best, sweep = (TESTBED, None) if quick else best_baseline(3.0, seeds, calls)
    beds = {DISTSERVE: best}
    progress(f"DistServe's own settings: {best.chunk} tokens a step, {best.decode_slots} slots")
    curves: Curves = {}
    for name in PAIRS:
        each = rates if name in MAIN else ABLATION_RATES
        curves[name] = curve(name, each, seeds, beds.get(name, TESTBED), calls)
        progress(f"{name} done")
    point, at = knee(curves[DISTSERVE]), equal_loads(curves)
    for rate in sorted(set(at.values()) - set(curves[DISTSERVE])):
        for name in MAIN:
            curves[name] |= curve(name, [rate], seeds, beds.get(name, TESTBED), calls)
    progress(f"loads equal to the paper's: {at}")
    tables = [table_of_gains(curves, at), table_of_paper(curves, point), table_of_curves(curves, point)]
    if sweep is not None:
        tables += [sweep, calibration(best, seeds, calls), other_cost(beds, (2.0, 3.4), seeds, calls)]
        progress("cost of a sequence, cost by sum done")
        tables.append(on_mooncake(beds, seeds, count))
    text = SETTINGS.format(over=times_knee(3.0), under=times_knee(2.0))
    return Section("Kairos", text, claims(curves, at, seeds), tables, plots(curves))
