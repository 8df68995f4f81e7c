"""Concord, Figures 6.2 and 6.8 to 6.10 with the trained analyser in place of the noise model: CALM as printed, and with
goodput weighed by chance, against the baselines at their best settings of the stored sweep.

The cases of Figures 6.8 to 6.10 are those of part `systems`, with its programs and seed; Figure 6.2 has fewer programs.
Each composition, tightness, rate and number of engines has an analyser of its own, trained on other seeds of it. Why a
claim is missed is said by more runs of its worst case: of CALM with the oracle's giving-up rule, and of the oracle.
Each figure is a part of its own, so that one can be run again alone; what several figures share is run once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import CHANGED, PRINTED, Claim, Progress, Section, Table, Value
from benchmarks.reproduce.concord import sensitivity
from benchmarks.reproduce.concord.ablation import KINDS, kept
from benchmarks.reproduce.concord.chance import CHANCE
from benchmarks.reproduce.concord.lab import LTR, ORACLE, TRAINED, Case, Lab, LabFigures, System, run
from benchmarks.reproduce.concord.oracle import HEADLINE, at_these
from benchmarks.reproduce.concord.request_goodput import request_goodput, told_requests
from benchmarks.reproduce.concord.sweep import stored_best
from benchmarks.reproduce.concord.trained import exchanged
from controller.simulator.workloads.analyser import GIVING_UP

REQUESTS = "trained_requests"
PARTS: Mapping[str, str] = {  # with their figures
    REQUESTS: "Fig. 6.2",
    "trained_slos": "Fig. 6.9",
    "trained_mixes": "Fig. 6.10",
    "trained_replicas": "Fig. 6.8",
}
PROGRAMS, SEEDS = 600, (1, 2)  # of Figure 6.2; the others have as many programs, and the seed of part `systems`
CALMS = (TRAINED, CHANCE)
OTHERS = sensitivity.OTHERS


def reproduce(quick: bool, progress: Progress, parts: Sequence[str] = tuple(PARTS)) -> Section:
    """Some of PARTS. Raises RuntimeError where the baselines' sweep or the oracle's is not stored."""
    systems = [*CALMS, *(stored_best(name) for name in OTHERS)]
    lab = Lab({system.name: system for system in systems}, quick, progress)
    programs, seeds = (60, SEEDS[:1]) if quick else (PROGRAMS, SEEDS)
    base = Case(sensitivity.RATE, programs, sensitivity.SEED)
    causes = Causes(lab, CALMS)
    claims: list[Claim] = []
    tables: list[Table] = []
    for part, figure in PARTS.items():
        if part not in parts:
            continue
        if part == REQUESTS:
            made = [(calm, requests_claim(lab, calm, programs, seeds)) for calm in CALMS]
            shown = [requests_table(lab, programs, seeds)]
        else:
            made = [
                (calm, claim) for calm in CALMS for claim in sensitivity.claims(lab, base, calm.name, causes, [figure])
            ]
            shown = sensitivity.tables(lab, base, [calm.name for calm in CALMS], [figure])
        claims += [_told(calm, claim, part) for calm, claim in made]
        tables += [replace(each, title=f"Trained analyser, {each.title}", part=part) for each in shown]
    return Section("concord", "", claims, tables)


def requests_claim(lab: Lab, calm: System, programs: int, seeds: Sequence[int]) -> Claim:
    setting = f"{HEADLINE:g} programs/s on one engine, {programs} programs a seed"
    found = request_goodput(lab, calm.name, programs, seeds, setting)
    if found.reached:
        return found
    own = lab.figures(calm.name, told_requests(programs, seeds[0]))
    ltr = lab.figures(LTR.name, Case(HEADLINE, programs, seeds[0]))
    return replace(found, reason=f"{found.reason}. {both_kept(own, LTR.name, ltr, f'Seed {seeds[0]}')}")


def _told(calm: System, claim: Claim, part: str) -> Claim:
    changed = calm is CHANCE
    told = "trained analyser, goodput weighed by chance" if changed else "trained analyser"
    return replace(
        claim, claim=f"{told}: {claim.claim}", part=part, verdict=CHANGED if changed else PRINTED, analyser="trained"
    )


class Causes:
    """Why CALM earns less in a case than asked for."""

    def __init__(self, lab: sensitivity.Runner, calms: Sequence[System]) -> None:
        self._lab = lab
        self._calms = {calm.name: calm for calm in calms}

    def __call__(self, calm: str, which: str, case: Case, others: Sequence[str]) -> str:
        own = self._lab.figures(calm, case)
        best = max(others, key=lambda name: self._lab.figures(name, case).tokens_per_s)
        theirs = self._lab.figures(best, case)
        told = run(exchanged(self._calms[calm])[GIVING_UP], case).tokens_per_s / max(1e-9, theirs.tokens_per_s)
        most = at_these(ORACLE, [case])[0].tokens_per_s / max(1e-9, theirs.tokens_per_s)
        return (
            f"{both_kept(own, best, theirs, which)}. With the oracle's giving-up rule in place of its own CALM earns "
            f"{told:.2f} times as much as {best} there, and the oracle {most:.2f} times"
        )


def both_kept(own: LabFigures, name: str, theirs: LabFigures, which: str) -> str:
    """What each kept of the types that come in this case."""
    kinds = [kind for kind in KINDS if kind in own.by_kind]
    return f"{which}; of {', '.join(kinds)} programs CALM kept {kept(own, kinds)} % and {name} {kept(theirs, kinds)} %"


def requests_table(lab: Lab, programs: int, seeds: Sequence[int]) -> Table:
    """Figure 6.2, with CALM that is told that goodput is counted in requests."""
    rows: list[Sequence[Value]] = []
    for name in (*(calm.name for calm in CALMS), *OTHERS):
        for seed in seeds:
            told = any(name == calm.name for calm in CALMS)
            found = lab.figures(name, told_requests(programs, seed) if told else Case(HEADLINE, programs, seed))
            met = (round(found.by_kind.get(kind, 0.0), 3) for kind in KINDS)
            rows.append([name, seed, round(found.requests_per_s, 3), *met])
    columns = ["system", "seed", "requests/s in time", *(f"{kind} met" for kind in KINDS)]
    return Table(f"Figure 6.2: request goodput at {HEADLINE:g} programs/s", columns, rows)
