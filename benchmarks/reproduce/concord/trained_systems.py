"""Concord, Figures 6.1, 6.4, 6.5, 6.6 and 6.11 with the trained analyser in place of the noise model: CALM as printed,
and with goodput weighed by chance, against the baselines at their best settings of the stored sweep.

Baselines read no analyser; LTR keeps its own ranking error. Smaller than part `systems`: fewer programs, rates and
seeds. Figures 6.2 and 6.8 to 6.10 are in parts of their own (`trained_sensitivity.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import CHANGED, PRINTED, Claim, Progress, Section, Table, Value
from benchmarks.reproduce.concord.chance import CHANCE
from benchmarks.reproduce.concord.lab import AUTELLIX, EDF, LTR, SARATHI, TRAINED, Case, LabFigures, System, run
from benchmarks.reproduce.concord.latency import latencies
from benchmarks.reproduce.concord.oracle import HEADLINE
from benchmarks.reproduce.concord.sweep import finite, stored_best

PART = "trained_systems"
RATES, SEEDS, PROGRAMS = (2.0, HEADLINE), (1, 2), 500
CALMS = (TRAINED, CHANCE)
BASELINES = (LTR.name, AUTELLIX.name, SARATHI.name, EDF.name)
JUDGED = (LTR.name, SARATHI.name, EDF.name)  # Autellix is built from a description
FIGURES = {LTR.name: "Fig. 6.1", AUTELLIX.name: "Fig. 6.1", SARATHI.name: "Fig. 6.5", EDF.name: "Fig. 6.11"}
PAPER = {LTR.name: 1.3, AUTELLIX.name: 5.3}  # times the baseline's goodput, at least
BUILT = "not judged: Autellix is built from its description in Concord's text and from excerpts of its paper"
SPENT = (
    "the printed rule counts goodput as sure until nine of ten like it would have been late, so that much is spent on "
    "programs that hardly end in time; decision 261 weighs it by the chance"
)
Grid = Mapping[str, Mapping[float, Sequence[LabFigures]]]


def systems() -> list[System]:
    return [*CALMS, *(stored_best(name) for name in BASELINES)]


def reproduce(quick: bool, progress: Progress) -> Section:
    """Both seeds at the headline's rate, the first one at the other. Raises RuntimeError without a stored sweep."""
    rates, seeds, programs = ((HEADLINE,), SEEDS[:1], 60) if quick else (RATES, SEEDS, PROGRAMS)
    grid: dict[str, dict[float, list[LabFigures]]] = {}
    for rate in rates:
        for seed in seeds if rate == HEADLINE else seeds[:1]:
            for system in systems():
                found = run(system, Case(rate, programs, seed))
                grid.setdefault(system.name, {}).setdefault(rate, []).append(found)
                progress(f"{system.name} at {rate:g}/s, seed {seed}: {found.tokens_per_s:.0f} tokens/s")
    return Section("concord", "", claims(grid, seeds, programs), [table(grid)])


def claims(grid: Grid, seeds: Sequence[int], programs: int) -> list[Claim]:
    setting = f"{HEADLINE:g} programs/s on one engine, {programs} programs a seed"
    found: list[Claim] = []
    for calm in CALMS:
        for name in BASELINES:
            times = statistics.fmean(
                mine.tokens_per_s / max(1e-9, other.tokens_per_s)
                for mine, other in zip(grid[calm.name][HEADLINE], grid[name][HEADLINE], strict=True)
            )
            bar = PAPER.get(name)
            missed = times < (bar or 1.0)
            why = BUILT if name not in JUDGED else SPENT if missed and calm is TRAINED else ""
            found.append(
                _claim(calm, FIGURES[name], f"token goodput over {name} (factor)", bar, times,
                       not missed if name in JUDGED else None, setting, seeds,
                       why, bar=None if bar else 1.0)
            )  # fmt: skip
        found.append(_highest(calm, grid, seeds[:1], programs))
    share = min(
        100 * mine.throughput / other.throughput
        for mine, other in zip(grid[TRAINED.name][HEADLINE], grid[SARATHI.name][HEADLINE], strict=True)
    )
    more = "generated tokens; CALM spends more of its steps on prompts, and leaves late requests until no other needs "
    found.append(
        _claim(TRAINED, "Fig. 6.4", "throughput against Sarathi-Serve's, lowest of the seeds (%; the paper: 96)", 96.0,
               share, share >= 96.0, setting, seeds, more + "the time")
    )  # fmt: skip
    head = {name: by_rate[HEADLINE] for name, by_rate in grid.items()}
    found += [
        replace(each, claim=f"trained analyser: {each.claim}", part=PART, analyser="trained")
        for each in latencies(head, seeds[:1], setting)
    ]
    return found


def _highest(calm: System, grid: Grid, seeds: Sequence[int], programs: int) -> Claim:
    """Within 1 % counts as equal, as in part `systems`."""
    rates = sorted(grid[calm.name])
    wins = sum(
        grid[calm.name][rate][0].tokens_per_s >= 0.99 * max(grid[name][rate][0].tokens_per_s for name in JUDGED)
        for rate in rates
    )
    where = f"{' and '.join(f'{rate:g}' for rate in rates)} programs/s on one engine, {programs} programs a rate"
    share = 100 * wins / len(rates)
    return _claim(calm, "Fig. 6.5", "share of the rates at which goodput is the highest of those built from their "
                  "papers or code (%)", 100.0, share, wins == len(rates), where, seeds, "")  # fmt: skip


def _claim(calm: System, figure: str, claim: str, theirs: float | None, ours: float, reached: bool | None,
           setting: str, seeds: Sequence[int], reason: str, bar: float | None = None) -> Claim:  # fmt: skip
    changed = calm is CHANCE
    told = "trained analyser, goodput weighed by chance" if changed else "trained analyser"
    return Claim("concord", figure, f"{told}: {claim}", theirs, round(ours, 3), reached, setting, list(seeds), reason,
                 PART, verdict=CHANGED if changed else PRINTED, bar=bar, analyser="trained")  # fmt: skip


def table(grid: Grid) -> Table:
    rows: list[Sequence[Value]] = []
    for name, by_rate in grid.items():
        for rate, runs in sorted(by_rate.items()):
            means = [statistics.fmean(getattr(each, key) for each in runs) for key in ("tokens_per_s", "throughput")]
            met = [statistics.fmean(each.by_kind.get(kind, 0.0) for each in runs)
                   for kind in ("latency", "deadline", "compound")]  # fmt: skip
            waited = (finite(value) for value in (*runs[0].ttft, *runs[0].tbt))
            rows.append([name, rate, *(round(each) for each in means), *(round(each, 3) for each in met), *waited])
    columns = ["system", "programs/s", "goodput tokens/s", "generated tokens/s", "latency met", "deadline met",
               "compound met", "TTFT p50 s", "p95", "TBT p50 s", "p95"]  # fmt: skip
    return Table("Trained analyser, Figures 6.1 and 6.4 to 6.6: CALM and the baselines", columns, rows, part=PART)
