"""Concord, Figure 6.7, and Figure 6.3's gap by seed, at the headline's load, with the trained analyser: CALM beside the
oracle, itself without the analyser, and the analyser without CALM (shortest job first).

Where one of them earns more, the reason is what each seed's runs kept of each type of request.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.reproduce.claims import Claim, Progress, Section, Table, Value
from benchmarks.reproduce.concord.lab import BLIND, ORACLE, SJF, TRAINED, Case, LabFigures
from benchmarks.reproduce.concord.oracle import HEADLINE, MOST, PROGRAMS, at_these, below

PART = "ablation"
SEEDS = (1, 2)
ABLATED = (TRAINED.variant(name=BLIND.name, foresight="blind"), SJF.variant(foresight="trained"))
SYSTEMS = (TRAINED, ORACLE, *ABLATED)
KINDS = ("latency", "deadline", "compound")
Head = Mapping[str, Sequence[LabFigures]]


def reproduce(quick: bool, progress: Progress) -> Section:
    seeds, programs = (SEEDS[:1], 60) if quick else (SEEDS, PROGRAMS)
    head: dict[str, list[LabFigures]] = {}
    for system in SYSTEMS:
        head[system.name] = at_these(system, [Case(HEADLINE, programs, seed) for seed in seeds])
        earned = ", ".join(f"{found.tokens_per_s:.0f}" for found in head[system.name])
        progress(f"{system.name} at {HEADLINE:g}/s, by seed: {earned} tokens/s")
    return Section("concord", "", claims(head, seeds, programs), [table(head, seeds)])


def claims(head: Head, seeds: Sequence[int], programs: int) -> list[Claim]:
    """The gap is not judged where the oracle earns less than CALM: then it is no upper bound."""
    setting = f"{HEADLINE:g} programs/s on one engine, {programs:,} programs a seed"
    own, oracle = (statistics.fmean(each.tokens_per_s for each in head[of.name]) for of in (TRAINED, ORACLE))
    gap = below(own, oracle)
    found = [
        Claim("concord", "Fig. 6.3", "trained analyser: token goodput below the oracle's (%, at most; the paper: 3 to "
              "9)", MOST, round(gap, 3), gap <= MOST if gap >= 0 else None, setting, list(seeds),
              by_seed(head, ORACLE.name, seeds), PART, analyser="trained")
    ]  # fmt: skip
    for system in ABLATED:
        least = min(times_by_seed(head, system.name))
        found.append(
            Claim("concord", "Fig. 6.7", f"trained analyser: token goodput over {system.name}, lowest of the seeds "
                  "(factor; the paper: above 1, shown as bars)", None, round(least, 3), least > 1.0, setting,
                  list(seeds), "" if least > 1.0 else by_seed(head, system.name, seeds), PART, bar=1.0,
                  analyser="trained")
        )  # fmt: skip
    return found


def times_by_seed(head: Head, name: str) -> list[float]:
    """CALM's goodput over the other's."""
    return [
        own.tokens_per_s / max(1e-9, other.tokens_per_s)
        for own, other in zip(head[TRAINED.name], head[name], strict=True)
    ]


def by_seed(head: Head, name: str, seeds: Sequence[int]) -> str:
    """What CALM and the other kept of each type, in each seed's runs."""
    told = [
        f"seed {seed} {times:.3f}, of {', '.join(KINDS)} programs CALM kept {kept(own)} % and the other {kept(other)} %"
        for seed, times, own, other in zip(
            seeds, times_by_seed(head, name), head[TRAINED.name], head[name], strict=True
        )
    ]
    return "CALM's goodput over the other's: " + "; ".join(told)


def kept(found: LabFigures, kinds: Sequence[str] = KINDS) -> str:
    return ", ".join(f"{100 * found.by_kind.get(kind, 0.0):.0f}" for kind in kinds)


def table(head: Head, seeds: Sequence[int]) -> Table:
    rows: list[Sequence[Value]] = [
        [name, seed, round(found.tokens_per_s), *(round(found.by_kind.get(kind, 0.0), 3) for kind in KINDS)]
        for name, runs in head.items()
        for seed, found in zip(seeds, runs, strict=True)
    ]
    columns = ["system", "seed", "goodput tokens/s", *(f"{kind} met" for kind in KINDS)]
    return Table(f"Trained analyser, Figure 6.7: ablation at {HEADLINE:g} programs/s", columns, rows, part=PART)
