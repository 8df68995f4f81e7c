"""Concord's mix with recorded agents in place of its compound requests, beside Table 6.1 (`--traces`: their folder).

A session of `swebench_agent_sessions` is a program, a call after another. What its tools took lies between the calls; a
prompt is what came since the call before, since all earlier text is in the prefix cache. The forest and the graphs are
trained on every second session, the others run. Not in the trace, and chosen here: the first MOST_CALLS calls of a
session are a program, whose deadline is 20 s a call beside the time of its tools, each of LONGEST_TOOL_S at most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.analyzer.graphs import AGENTS, sessions
from benchmarks.reproduce.claims import CHANGED, PRINTED, Claim, Progress, Section, Table, Value
from benchmarks.reproduce.concord.chance import CHANCE
from benchmarks.reproduce.concord.lab import (
    BLIND,
    BLIND_TO_STAGES,
    LTR,
    ORACLE,
    SARATHI,
    TRAINED,
    Case,
    LabFigures,
)
from benchmarks.reproduce.concord.oracle import MOST, SAME, at_these, below
from benchmarks.reproduce.concord.trained import TOLD, exchanged
from controller.core.types import Targets
from controller.predict.pattern_graphs import Call
from controller.simulator.workloads.concord_mix import E2E_S, LONGEST_ANSWER, LONGEST_PROMPT, ConcordMix
from controller.simulator.workloads.mixes import PATIENT_S
from controller.simulator.workloads.programs import Program, ProgramCall, ProgramStage

PART = "agents"
TRACE = "swebench_agent_sessions"
MOST_CALLS = 20
LONGEST_TOOL_S = 20.0
RATES, PROGRAMS, SEED, JOBS = (0.5, 1.0), 300, 1, 1  # each process trains the analyser of its own
TRAINED_ON, ASKED = 0, 1  # halves of the sessions
OTHERS = (BLIND, BLIND_TO_STAGES, LTR, SARATHI)
KNOWS = "this ablation is told how many calls a session has, of which an agent tells nobody; "
SETTING = (
    f"mix with SWE-bench agents in place of compound requests, one engine, {PROGRAMS} programs a rate; settings not "
    "swept for this mix"
)


@dataclass(frozen=True, slots=True)
class AgentMix:
    """`digest` of the trace's file, which tells trained forests apart. `half`: which sessions are drawn from."""

    path: str
    digest: str
    half: int

    def programs(self, times: Sequence[float], seed: int) -> list[Program]:
        """Of the mix, each compound one in place of which a session is drawn."""
        rng = np.random.default_rng([seed, 13])
        known = _sessions(self.path)[self.half :: 2]
        return [
            each if each.single else program_of(each, known[int(rng.integers(len(known)))])
            for each in ConcordMix().programs(times, seed)
        ]


def program_of(place: Program, calls: Sequence[Call]) -> Program:
    """The session as a program that comes at the time and under the name of another."""
    stages: list[ProgramStage] = []
    calls = calls[:MOST_CALLS]
    before = 0
    for number, call in enumerate(calls):
        prompt = call.input_tokens - before if call.input_tokens > before else call.input_tokens
        before = call.input_tokens + call.output_tokens
        pause = calls[number + 1].began - (call.ended or call.began) if number + 1 < len(calls) else 0.0
        own = ProgramCall(min(max(1, prompt), LONGEST_PROMPT), min(max(1, call.output_tokens), LONGEST_ANSWER))
        stages.append(ProgramStage((own,), min(max(0.0, pause), LONGEST_TOOL_S)))
    deadline = E2E_S * len(stages) + sum(stage.tool_s for stage in stages)
    return Program(
        place.id, place.at, "compound", tuple(stages), Targets(deadline, deadline, deadline, PATIENT_S), TRACE
    )


@cache
def _sessions(path: str) -> list[list[Call]]:
    """Those of at least two calls."""
    found = sessions(Path(path), AGENTS[TRACE])
    return [found[name] for name in sorted(found) if len(found[name]) > 1]


def halves(folder: Path) -> tuple[AgentMix, AgentMix]:
    """What is trained on, and what runs. Raises FileNotFoundError where the folder has no such trace."""
    file = folder / f"{TRACE}.csv.gz"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return AgentMix(str(file), digest, TRAINED_ON), AgentMix(str(file), digest, ASKED)


def reproduce(folder: Path, quick: bool, progress: Progress) -> Section:
    training, asked = halves(folder)
    grid: dict[str, dict[float, LabFigures]] = {}
    ablated = (TRAINED.variant(name=each.name, foresight=each.foresight) for each in (BLIND, BLIND_TO_STAGES))
    systems = (TRAINED, CHANCE, ORACLE, *exchanged(TRAINED).values(), *ablated, LTR, SARATHI)
    programs, jobs = (60, 1) if quick else (PROGRAMS, JOBS)
    cases = [Case(rate, programs, SEED, mix=asked, trained_on=training) for rate in (RATES[:1] if quick else RATES)]
    wanted = [(system, [case]) for case in cases for system in systems]
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        made = pool.map(at_these, *zip(*wanted, strict=True))
        for (system, (case,)), (found,) in zip(wanted, made, strict=True):
            grid.setdefault(system.name, {})[case.rate] = found
            progress(f"agents: {system.name} at {case.rate:g}/s: {found.tokens_per_s:.0f} tokens/s")
    return Section("concord", "", claims(grid), [table(grid)])


def claims(grid: dict[str, dict[float, LabFigures]]) -> list[Claim]:
    found: list[Claim] = []
    for rate, calm in grid[TRAINED.name].items():
        oracle = grid[ORACLE.name][rate].tokens_per_s
        gap = below(calm.tokens_per_s, oracle)
        bound = gap >= -100 * (1 / SAME - 1)
        left = ", ".join(
            f"{below(grid[system.name][rate].tokens_per_s, oracle):.1f} % with the oracle's {TOLD[part]}"
            for part, system in exchanged(TRAINED).items()
        )
        found.append(
            Claim("concord", "Fig. 6.3", f"agents at {rate:g} programs/s: token goodput below the oracle's (%, at "
                  "most; the paper's mix: 3 to 9)", None, round(gap, 2), gap <= MOST if bound else None, SETTING,
                  [SEED], left, PART, bar=MOST, analyser="trained")
        )  # fmt: skip
        for system, name in (*((TRAINED, each.name) for each in OTHERS), (CHANCE, BLIND_TO_STAGES.name)):
            times = grid[system.name][rate].tokens_per_s / max(1e-9, grid[name][rate].tokens_per_s)
            figure = "Fig. 6.7" if name in (BLIND.name, BLIND_TO_STAGES.name) else "Fig. 6.5"
            why = f"{KNOWS if name == BLIND.name else ''}below the oracle {left}"
            how = ", goodput weighed by chance" if system is CHANCE else ""
            found.append(
                Claim("concord", figure, f"agents{how} at {rate:g} programs/s: token goodput over {name} (factor)",
                      None, round(times, 3), times > 1.0, SETTING, [SEED], "" if times > 1.0 else why, PART,
                      verdict=CHANGED if how else PRINTED, bar=1.0, analyser="trained")
            )  # fmt: skip
    return found


def table(grid: dict[str, dict[float, LabFigures]]) -> Table:
    rows: list[Sequence[Value]] = []
    for name, by_rate in grid.items():
        for rate, found in sorted(by_rate.items()):
            kinds = (round(found.by_kind.get(kind, 0.0), 3) for kind in ("latency", "deadline", "compound"))
            rows.append([name, rate, round(found.tokens_per_s), *kinds])
    columns = ["system", "programs/s", "goodput tokens/s", "latency met", "deadline met", "agents met"]
    return Table("SWE-bench agents in place of compound requests", columns, rows, part=PART)
