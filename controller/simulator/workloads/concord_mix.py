"""Concord's workload (ch. 6.1): latency-sensitive, deadline-sensitive and compound requests, 1:1:1 by default.

Lengths are lognormal with the medians and 95 % points of Table 6.1, which gives its means within 10 %. Half of each
kind comes from its chatbot, half from its deep research application (the other two have no published figures). Targets:
TTFT 2 s and TBT 100 ms; 20 s end to end; 20 s x stages for compound requests, whose lengths in the table are taken as
those of the whole program. Not in the paper, and chosen here: 3 to 5 stages, all but the last with 2 to 5 calls in
parallel; tokens divided among the calls with a coefficient of variation of 0.5; tools of 0.5 to 2 s between the stages
of deep research.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from controller.core.errors import ConfigError
from controller.core.types import Targets
from controller.simulator.workloads.mixes import PATIENT_S
from controller.simulator.workloads.programs import Program, ProgramCall, ProgramStage

KINDS = ("latency", "deadline", "compound")
TTFT_S, TBT_S, E2E_S = 2.0, 0.1, 20.0
P95 = 1.6448536269514722  # standard deviations of a normal distribution
STAGES, WIDTH = (3, 5), (2, 5)
SPREAD = 4.0  # gamma shape of the calls' shares of tokens: a coefficient of variation of 0.5
LONGEST_PROMPT, LONGEST_ANSWER = 12_000, 2_048  # tokens of one call


def calls_each(shares: Sequence[float]) -> float:
    """Mean number of calls per program, by the shares of latency, deadline and compound ones."""
    compound = (sum(STAGES) / 2 - 1) * sum(WIDTH) / 2 + 1
    return (shares[0] + shares[1] + shares[2] * compound) / sum(shares)


class Median95(NamedTuple):
    """A lognormal length by its median and 95 % point, in tokens."""

    median: float
    p95: float

    def draw(self, rng: np.random.Generator) -> float:
        sigma = math.log(self.p95 / self.median) / P95
        return float(rng.lognormal(math.log(self.median), sigma))


class AppMix(NamedTuple):
    """Table 6.1: lengths of single requests and of compound ones (the whole program). `tool_s`: between stages."""

    name: str
    prompt: Median95
    output: Median95
    compound_prompt: Median95
    compound_output: Median95
    tool_s: tuple[float, float]


APPS = (
    AppMix("chatbot", Median95(27, 391), Median95(225, 1024), Median95(1097, 2767), Median95(4417, 6452), (0.0, 0.0)),
    AppMix(
        "deep_research",
        Median95(403, 7573),
        Median95(410, 1544),
        Median95(10807, 29282),
        Median95(3148, 7525),
        (0.5, 2.0),
    ),
)


@dataclass(frozen=True, slots=True)
class ConcordMix:
    """`shares`: of latency, deadline and compound programs. `slo_scale`: factor on all targets."""

    shares: tuple[float, float, float] = (1.0, 1.0, 1.0)
    slo_scale: float = 1.0

    def __post_init__(self) -> None:
        if len(self.shares) != len(KINDS) or min(self.shares) < 0 or not sum(self.shares) > 0:
            raise ConfigError("shares must be three numbers of at least 0, not all 0", field="shares")
        if not self.slo_scale > 0:
            raise ConfigError("slo_scale must be positive", field="slo_scale")

    def programs(self, times: Sequence[float], seed: int) -> list[Program]:
        """One program for each arrival time (seconds). The same seed gives the same programs whatever the times."""
        rng = np.random.default_rng([seed, 11])
        whole = sum(self.shares)
        kinds = rng.choice(len(KINDS), len(times), p=[share / whole for share in self.shares])
        apps = rng.integers(0, len(APPS), len(times))
        return [
            self._program(f"p{number}", at, KINDS[kind], APPS[app], np.random.default_rng([seed, 12, number]))
            for number, (at, kind, app) in enumerate(zip(times, kinds.tolist(), apps.tolist(), strict=True))
        ]

    def _program(self, name: str, at: float, kind: str, app: AppMix, rng: np.random.Generator) -> Program:
        scale = self.slo_scale
        if kind == "compound":
            stages = _stages(app, rng)
            deadline = E2E_S * scale * len(stages)
            return Program(name, at, kind, stages, Targets(deadline, deadline, deadline, PATIENT_S), app.name)
        stage = ProgramStage((_call(app.prompt.draw(rng), app.output.draw(rng)),))
        if kind == "latency":
            return Program(name, at, kind, (stage,), Targets(TTFT_S * scale, TBT_S * scale, None, PATIENT_S), app.name)
        deadline = E2E_S * scale
        return Program(name, at, kind, (stage,), Targets(deadline, deadline, deadline, PATIENT_S), app.name)


def _stages(app: AppMix, rng: np.random.Generator) -> tuple[ProgramStage, ...]:
    count = int(rng.integers(STAGES[0], STAGES[1] + 1))
    widths = [int(rng.integers(WIDTH[0], WIDTH[1] + 1)) for _ in range(count - 1)] + [1]
    calls = sum(widths)
    prompts = _parts(app.compound_prompt.draw(rng), calls, rng)
    outputs = _parts(app.compound_output.draw(rng), calls, rng)
    stages, at = [], 0
    for number, width in enumerate(widths):
        own = tuple(_call(prompts[at + i], outputs[at + i]) for i in range(width))
        tool = float(rng.uniform(*app.tool_s)) if number < count - 1 else 0.0
        stages.append(ProgramStage(own, tool))
        at += width
    return tuple(stages)


def _parts(whole: float, count: int, rng: np.random.Generator) -> list[float]:
    weights = rng.gamma(SPREAD, 1.0, count)
    parts: list[float] = (whole * weights / weights.sum()).tolist()
    return parts


def _call(prompt: float, output: float) -> ProgramCall:
    return ProgramCall(
        max(1, min(round(prompt), LONGEST_PROMPT)),
        max(1, min(round(output), LONGEST_ANSWER)),
    )
