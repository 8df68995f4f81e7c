"""Concord, Figures 6.8 to 6.10 and burstiness: replicas, SLO tightness, composition, arrivals, predictor error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from benchmarks.reproduce.claims import Claim, Table, Value
from benchmarks.reproduce.concord.lab import AUTELLIX, CONCORD, LTR, SARATHI, Case, LabFigures
from controller.simulator.workloads.concord_mix import ConcordMix

RATE, SEED = 4.0, 8
SETTING = (
    "rates of equal work (see the tables), one engine but for Figure 6.8; 600 programs (some 2,700 requests) an "
    "engine, more where all are single"
)
SIZE = "600 programs an engine, one seed"
OTHERS = (LTR.name, AUTELLIX.name, SARATHI.name)
MIXES = {
    "1:1:1": (1.0, 1.0, 1.0),
    "latency only": (1.0, 0.0, 0.0),
    "1 latency : 2 deadline": (1.0, 2.0, 0.0),
    "no latency": (0.0, 1.0, 1.0),
    "2 latency : 1 compound": (2.0, 0.0, 1.0),
}
# Programs/s at which a mix needs as much engine time as 1:1:1 at RATE: a single is a ninth of a compound's work.
MIX_RATES = {"1:1:1": 4.0, "latency only": 16.0, "1 latency : 2 deadline": 16.0, "no latency": 2.8,
             "2 latency : 1 compound": 4.0}  # fmt: skip


LOAD = (
    "The factor is over each baseline at its own best settings, and grows with the load, which the paper does not give"
)
SINGLES = (
    "without compound requests CALM cannot gain by finishing the programs that it has begun, and serving the "
    "shortest first also works well for single short requests"
)


class Runner(Protocol):
    quick: bool

    def figures(self, name: str, case: Case) -> LabFigures: ...


def sensitivity(lab: Runner, quick: bool) -> tuple[list[Claim], list[Table]]:
    base = Case(RATE, 60 if quick else 600, SEED)
    claims: list[Claim] = []
    tables = [
        _table(lab, "Figure 6.9: SLO tightness", "all targets times", {
            f"{scale:g}": replace(base, mix=ConcordMix(slo_scale=scale)) for scale in (0.8, 1.0, 1.5)
        }),
        _table(lab, "Figure 6.10: composition", "mix (rate of equal work)", {
            name: replace(base, rate=MIX_RATES[name], mix=ConcordMix(shares), programs=_programs(name, base.programs))
            for name, shares in MIXES.items()
        }),
        _table(lab, "Figure 6.8: replicas (rate grows with them)", "engines", {
            str(count): replace(base, engines=count, rate=RATE * count, programs=base.programs * count)
            for count in ((1, 2) if quick else (1, 2, 4))
        }),
        _table(lab, "Burstiness: gamma renewals", "coefficient of variation", {
            f"{cv:g}": replace(base, cv=cv) for cv in (1.0, 2.0, 4.0)
        }),
        _errors(lab, base),
    ]  # fmt: skip
    claims += _claims(lab, base)
    return claims, tables


def _programs(mix: str, programs: int) -> int:
    return programs * 4 if MIX_RATES[mix] > 2 * RATE else programs


def _table(lab: Runner, title: str, what: str, cases: dict[str, Case]) -> Table:
    rows: list[Sequence[Value]] = []
    for label, case in cases.items():
        found = {name: lab.figures(name, case) for name in (CONCORD.name, *OTHERS)}
        own = found[CONCORD.name]
        rows.append([
            label, *(round(each.tokens_per_s) for each in found.values()),
            round(own.tokens_per_s / _most(found[name].tokens_per_s for name in OTHERS), 2),
            round(own.requests_per_s / _most(found[name].requests_per_s for name in OTHERS), 2),
        ])  # fmt: skip
    columns = [what, CONCORD.name, *OTHERS, "times the best other, tokens", "requests (tokens are what is maximised)"]
    return Table(f"{title}: goodput, tokens/s; {SIZE}", columns, rows)


def _errors(lab: Runner, base: Case) -> Table:
    rows: list[Sequence[Value]] = []
    for error in (0.0, 0.25, 0.5, 1.0):
        found = lab.figures(CONCORD.name, replace(base, length_error=error))
        rows.append([error, round(found.tokens_per_s), round(found.attained, 3)])
    return Table(
        f"Predictor error: CALM's goodput by the lognormal error of remaining lengths; {SIZE}",
        ["error", "goodput tokens/s", "attained"],
        rows,
    )


def _claims(lab: Runner, base: Case) -> list[Claim]:
    """From the runs of the tables."""

    def times(case: Case, others: Sequence[str], key: str = "tokens_per_s") -> float:
        own = getattr(lab.figures(CONCORD.name, case), key)
        return float(own / _most(getattr(lab.figures(name, case), key) for name in others))

    mixed = {
        name: replace(base, rate=MIX_RATES[name], mix=ConcordMix(MIXES[name]), programs=_programs(name, base.programs))
        for name in ("1 latency : 2 deadline", "latency only")
    }

    def undecided(cases: Sequence[Case]) -> bool:
        """Whether the best baseline of any case is Autellix, which is built from a description."""
        return any(
            max(OTHERS, key=lambda name: lab.figures(name, case).tokens_per_s) == AUTELLIX.name for case in cases
        )

    counts = (1, 2) if lab.quick else (1, 2, 4)
    replicas = [replace(base, engines=count, rate=RATE * count, programs=base.programs * count) for count in counts]
    tight = [replace(base, mix=ConcordMix(slo_scale=scale)) for scale in (0.8, 1.0, 1.5)]
    sarathi = min(times(case, (SARATHI.name,)) for case in tight)
    two, latency = [mixed["1 latency : 2 deadline"]], [mixed["latency only"]]
    found = [
        ("Fig. 6.8", "token goodput over the best baseline, replicas, lowest (factor; the paper: 1.34)", 1.34,
         replicas, OTHERS, LOAD),
        ("Fig. 6.9", "token goodput over the best baseline, SLOs 0.8 to 1.5, lowest (factor; the paper: 2.3)", 2.3,
         tight, OTHERS,
         f"lowest at 1.5 times the targets, where the same load is lighter; over Sarathi-Serve {sarathi:.2f}. {LOAD}"),
        ("Fig. 6.10", "token goodput over the best baseline, 33 % latency, 66 % deadline (factor; the paper: 1.8)", 1.8,
         two, OTHERS, SINGLES),
        ("Fig. 6.10", "token goodput over Sarathi-Serve, latency-sensitive only (factor; the paper: 1.72)", 1.72,
         latency, (SARATHI.name,), SINGLES),
    ]  # fmt: skip
    made = []
    for figure, claim, theirs, cases, others, reason in found:
        ours = min(times(case, others) for case in cases)
        reached = None if others is OTHERS and undecided(cases) else ours >= theirs
        why = "the best baseline is Autellix, built from its description" if reached is None else reason
        made.append(
            Claim("concord", figure, claim, theirs, round(ours, 3), reached, SETTING, [SEED], "" if reached else why)
        )
    return made


def _most(values: Iterable[float]) -> float:
    """Never 0, because others are divided by it."""
    return max(1e-9, *values)
