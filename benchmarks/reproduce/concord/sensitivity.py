"""Concord, Figures 6.8 to 6.10 and burstiness: replicas, SLO tightness, composition, arrivals, predictor error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from benchmarks.reproduce.claims import Claim, Table, Value
from benchmarks.reproduce.concord.lab import AUTELLIX, CONCORD, LTR, MIX, SARATHI, Case, LabFigures
from controller.simulator.workloads.concord_mix import ConcordMix, calls_each

RATE, SEED = 4.0, 8
FIGURES = ("Fig. 6.9", "Fig. 6.10", "Fig. 6.8")
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


# Of CALM by its name in a case of that description beside others: why it earns less than asked for.
Why = Callable[[str, str, Case, Sequence[str]], str]


def sensitivity(lab: Runner, quick: bool) -> tuple[list[Claim], list[Table]]:
    base = Case(RATE, 60 if quick else 600, SEED)
    made = tables(lab, base)
    made.append(
        _table(lab, "Burstiness: gamma renewals", "coefficient of variation", base, {
            f"{cv:g}": replace(base, cv=cv) for cv in (1.0, 2.0, 4.0)
        })
    )  # fmt: skip
    made.append(_errors(lab, base))
    return claims(lab, base), made


def tables(lab: Runner, base: Case, calms: Sequence[str] = (CONCORD.name,),
           figures: Sequence[str] = FIGURES) -> list[Table]:  # fmt: skip
    """Of these figures, with the programs of `base` on each engine. `calms`: forms of CALM, by their names."""
    told = {
        "Fig. 6.9": ("Figure 6.9: SLO tightness", "all targets times", tightness(base)),
        "Fig. 6.10": ("Figure 6.10: composition", "mix (rate of equal work)", compositions(base)),
        "Fig. 6.8": ("Figure 6.8: replicas (rate grows with them)", "engines", replicas(base, lab.quick)),
    }
    return [
        _table(lab, title, what, base, cases, calms)
        for title, what, cases in (told[each] for each in FIGURES if each in figures)
    ]


def tightness(base: Case) -> dict[str, Case]:
    return {f"{scale:g}": replace(base, mix=ConcordMix(slo_scale=scale)) for scale in (0.8, 1.0, 1.5)}


def compositions(base: Case) -> dict[str, Case]:
    return {
        name: replace(base, rate=MIX_RATES[name], mix=ConcordMix(shares), programs=_programs(name, base.programs))
        for name, shares in MIXES.items()
    }


def replicas(base: Case, quick: bool) -> dict[str, Case]:
    return {
        str(count): replace(base, engines=count, rate=RATE * count, programs=base.programs * count)
        for count in ((1, 2) if quick else (1, 2, 4))
    }


def _programs(mix: str, programs: int) -> int:
    return programs * 4 if MIX_RATES[mix] > 2 * RATE else programs


def _size(base: Case) -> str:
    return f"{base.programs} programs an engine, one seed"


def _table(lab: Runner, title: str, what: str, base: Case, cases: Mapping[str, Case],
           calms: Sequence[str] = (CONCORD.name,)) -> Table:  # fmt: skip
    rows: list[Sequence[Value]] = []
    for label, case in cases.items():
        found = {name: lab.figures(name, case) for name in (*calms, *OTHERS)}
        row: list[Value] = [label, *(round(each.tokens_per_s) for each in found.values())]
        for calm in calms:
            row += [
                round(found[calm].tokens_per_s / _most(found[name].tokens_per_s for name in OTHERS), 2),
                round(found[calm].requests_per_s / _most(found[name].requests_per_s for name in OTHERS), 2),
            ]
        rows.append(row)
    columns = [what, *calms, *OTHERS]
    for calm in calms:
        whose = "" if len(calms) == 1 else f"{calm}: "
        columns += [f"{whose}times the best other, tokens", f"{whose}requests (tokens are what is maximised)"]
    return Table(f"{title}: goodput, tokens/s; {_size(base)}", columns, rows)


def _errors(lab: Runner, base: Case) -> Table:
    rows: list[Sequence[Value]] = []
    for error in (0.0, 0.25, 0.5, 1.0):
        found = lab.figures(CONCORD.name, replace(base, length_error=error))
        rows.append([error, round(found.tokens_per_s), round(found.attained, 3)])
    return Table(
        f"Predictor error: CALM's goodput by the lognormal error of remaining lengths; {_size(base)}",
        ["error", "goodput tokens/s", "attained"],
        rows,
    )


def claims(lab: Runner, base: Case, calm: str = CONCORD.name, why: Why | None = None,
           figures: Sequence[str] = FIGURES) -> list[Claim]:  # fmt: skip
    """From the runs of the tables. `why`: the reason of what is missed, in place of one that holds of any analyser."""

    def times(case: Case, others: Sequence[str]) -> float:
        own = lab.figures(calm, case).tokens_per_s
        return own / _most(lab.figures(name, case).tokens_per_s for name in others)

    def undecided(cases: Iterable[Case]) -> bool:
        """Whether the best baseline of any case is Autellix, which is built from a description."""
        return any(
            max(OTHERS, key=lambda name: lab.figures(name, case).tokens_per_s) == AUTELLIX.name for case in cases
        )

    mixed, tight = compositions(base), tightness(base)
    two, latency = ({name: mixed[name]} for name in ("1 latency : 2 deadline", "latency only"))
    found = [
        ("Fig. 6.8", "token goodput over the best baseline, replicas, lowest (factor; the paper: 1.34)", 1.34,
         replicas(base, lab.quick), "engines:", OTHERS, LOAD),
        ("Fig. 6.9", "token goodput over the best baseline, SLOs 0.8 to 1.5, lowest (factor; the paper: 2.3)", 2.3,
         tight, "all targets times", OTHERS,
         "lowest at 1.5 times the targets, where the same load is lighter; over Sarathi-Serve {sarathi:.2f}. " + LOAD),
        ("Fig. 6.10", "token goodput over the best baseline, 33 % latency, 66 % deadline (factor; the paper: 1.8)", 1.8,
         two, "mix", OTHERS, SINGLES),
        ("Fig. 6.10", "token goodput over Sarathi-Serve, latency-sensitive only (factor; the paper: 1.72)", 1.72,
         latency, "mix", (SARATHI.name,), SINGLES),
    ]  # fmt: skip
    setting = (
        f"rates of equal work (see the tables), one engine but for Figure 6.8; {base.programs} programs (some "
        f"{round(base.programs * calls_each(MIX.shares), -2):,.0f} requests) an engine, more where all are single"
    )
    made = []
    for figure, claim, theirs, cases, what, others, reason in found:
        if figure not in figures:
            continue
        worst = min(cases, key=lambda label: times(cases[label], others))
        ours = times(cases[worst], others)
        reached = None if others is OTHERS and undecided(cases.values()) else ours >= theirs
        if reached is None:
            told = "the best baseline is Autellix, built from its description"
        elif why is not None and not reached:
            told = why(calm, f"{what} {worst}", cases[worst], others)
        else:
            sarathi = min(times(case, (SARATHI.name,)) for case in cases.values())
            told = "" if reached else reason.format(sarathi=sarathi)
        made.append(Claim("concord", figure, claim, theirs, round(ours, 3), reached, setting, [SEED], told))
    return made


def _most(values: Iterable[float]) -> float:
    """Never 0, because others are divided by it."""
    return max(1e-9, *values)
