"""Kairos (Figures 3 to 6): urgency-based prefill and slack-guided decode against DistServe, QPS 2 to 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import Plot, Progress, Section, Table
from benchmarks.reproduce.kairos.fitting import decoders, table_of_decoders, table_of_tails, tails
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
    CONSTANTS,
    DISTSERVE,
    KAIROS,
    KAIROS_PRINTED,
    LONGEST,
    MEDIAN,
    OUTPUT_MEAN,
    OUTPUT_POWER,
    PAIRS,
    PER_SEQUENCE_S,
    SIGMA,
    TESTBED,
    Constant,
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
BATCHES = (  # prefill tokens per step, decode slots
    (1_024, 256), (2_048, 256), (4_096, 256), (8_192, 256), (131_072, 256), (8_192, 64), (8_192, 128),
)  # fmt: skip
SWEEP_SEEDS = (77, 78)  # none of the comparison's


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


def best_settings(
    name: str, rate: float, seeds: Sequence[int], calls: Callable[[float, int], list[StageCall]]
) -> tuple[Testbed, Table]:
    """A policy with settings of its own (size of a prefill batch, sequences per decode batch), and the whole sweep.

    The best meets both targets most often, then TTFT.
    """
    rows: list[list[str | float | None]] = []
    scored: list[tuple[float, float, Testbed]] = []
    for chunk, slots in BATCHES:
        bed = replace(TESTBED, chunk=chunk, decode_slots=slots)
        of = curve(name, [rate], seeds, bed, calls)[rate]
        rows.append([chunk, slots, *(round(median(of, key), 1) for key in ("ttft", "tpot", "e2e", "throughput"))])
        scored.append((median(of, "e2e"), median(of, "ttft"), bed))
    best = max(scored, key=lambda each: each[:2])[2]
    columns = ["prefill tokens a step", "decode slots", "TTFT %", "TPOT %", "both %", "tokens/s"]
    title = f"{name}: own settings at QPS {rate:g}; the comparison uses {best.chunk:,} and {best.decode_slots}"
    return best, Table(title, columns, rows)


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
sequence, as the paper has it, and {cost:.2f} ms a sequence.

The online trace is not public. Lengths: 1,000 quantiles of a lognormal law (median {median}, sigma
{sigma}, clipped to 32 to {longest}), outputs {outputs} x (prompt / 2,200)^{power} with lognormal noise
(sigma 0.8), Poisson arrivals; the seed draws order and arrivals. The prompts, the outputs, the cost of a
sequence and the KV cache of {kv} tokens are not published: they are fitted to what the paper publishes
of *DistServe*, and to nothing that it publishes of Kairos (two tables of candidates, by seeds that the
comparison does not use, with the constants in use beside them). No candidate comes close to all points:
the paper's DistServe keeps all TTFTs at QPS 2.8 and 76 % at 3.0, and misses a quarter to two fifths of
TPOTs at every load. The constants in use are the nearest for decode, but not for TTFT: the best candidate there has
prompts of at most 32,768 tokens. Longer ones are kept because the paper speaks of prompts of 128K, and decode, whose
pace the longest sequence sets, fits best with 131,072. The KV cache limits nothing: no request waits for it even at
QPS 5 (seed 1, DistServe and *as read*). Each policy runs with the best prefill batch and decode slots of its own sweep.

{constants}

*As read* is `kairos_urgency` for prefill and, for decode, `kairos_decode` with `reserve` "longest": it reserves
the time of a step with all sequences at the pace of the longest one. As a change of ours, sequences that can
no longer meet their target do not delay the others (decision 288). *As printed* is
`kairos_urgency_printed`, with a solo step reserved. All requests are of one class, so an engine's
own priority by class, or by deadline, is first come, first served, which is DistServe's order. S-EDF is
shown as the strongest other order.

The paper's largest gains are at QPS 3.0 (Figure 6: 2.0), which is {over:.2f} ({under:.2f}) times the load at
which its DistServe holds 90 % of TTFTs. Claims are judged at that multiple of our DistServe's own 90 %
TTFT point; the same QPS and the largest gain at any load are shown beside it. This paper runs in an
event loop of its own around the engine schedulers that serve, without a gateway; *Combined* simulates
the setting whole.
"""


PARTS = ("policies", "fit")


def settings_text() -> str:
    return SETTINGS.format(
        over=times_knee(3.0), under=times_knee(2.0), median=f"{MEDIAN:,}", sigma=SIGMA, longest=f"{LONGEST:,}",
        outputs=OUTPUT_MEAN, power=OUTPUT_POWER, cost=1000 * PER_SEQUENCE_S, kv=f"{TESTBED.kv_tokens:,}",
        constants="\n".join(("| constant | value | from |", "| --- | --- | --- |", *map(_line, CONSTANTS))),
    )  # fmt: skip


def _line(constant: Constant) -> str:
    return f"| {' | '.join(constant)} |"


def retold(stored: Section) -> Section:
    """Stored results with today's text."""
    return replace(stored, settings_text=settings_text())


def reproduce(progress: Progress, quick: bool, parts: Sequence[str] = PARTS) -> Section:
    """The comparison of policies, and the fit of the testbed (64 candidates, or none with `quick`)."""
    made = _policies(progress, quick) if "policies" in parts else Section("Kairos", "", ())
    if "fit" not in parts or quick:
        return made
    found = tails()
    fitted = [table_of_tails(found), table_of_decoders(decoders(found, progress))]
    return replace(made, tables=[*made.tables, *(replace(table, part="fit") for table in fitted)])


def _policies(progress: Progress, quick: bool) -> Section:
    """About ten minutes; with `quick` a few seconds on a fifth of the requests, at three loads and one seed."""
    seeds = SEEDS[:1] if quick else SEEDS
    rates = ABLATION_RATES if quick else RATES
    count = 200 if quick else 1000

    def calls(rate: float, seed: int) -> list[StageCall]:
        return long_tail(rate, seed, count)

    swept = {} if quick else {name: best_settings(name, 3.0, SWEEP_SEEDS, calls) for name in MAIN}
    beds = {name: best for name, (best, _) in swept.items()}
    progress(f"own settings: { {name: (best.chunk, best.decode_slots) for name, best in beds.items()} }")
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
    if not quick:
        tables += [sweep for _, sweep in swept.values()]
        tables.append(other_cost(beds, (2.0, 3.4), seeds, calls))
        progress("cost by sum done")
        tables.append(on_mooncake(beds, seeds, count))
    return Section(
        "Kairos",
        settings_text(),
        [replace(each, part="policies") for each in claims(curves, at, seeds)],
        [replace(each, part="policies") for each in tables],
        [replace(each, part="policies") for each in plots(curves)],
    )
