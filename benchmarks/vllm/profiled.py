"""Latency profile of the benchmark's vLLM servers: measured, or read from the last measurement."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.load.trials import note
from benchmarks.load.workloads import Task
from benchmarks.servers.engines import CONTEXT_TOKENS, MAX_NUM_SEQS, MODEL_NAME
from benchmarks.servers.stack import StackFleet
from controller.core.types import LatencyCoefficients
from controller.predict.latency import LatencyModel
from workers.profiler import ProfilingLimits, profile_engines

FULL_BUDGET_S, QUICK_BUDGET_S = 100.0, 25.0
# Round robin falls below 0.9 well before the engines are saturated, at about this share of their capacity.
KNEE_SHARE = 0.8


ALIKE = 1.25  # a step time further off than this is another machine's, or a disturbed one's
TYPICAL_BATCH, TYPICAL_CONTEXT, TYPICAL_PROMPT = 16, 400, 512


@dataclass(frozen=True, slots=True)
class Profiled:
    """`as_stored`: what was stored for a machine of this name holds now, so that stored knees do too."""

    coefficients: Mapping[str, float]
    kv_capacity_tokens: int | None
    as_stored: bool = True

    def alike(self, other: Profiled) -> bool:
        """Whether typical steps take about as long by both."""
        return all(1 / ALIKE <= a / b <= ALIKE for a, b in zip(self._steps(), other._steps(), strict=True))

    def _steps(self) -> tuple[float, float]:
        model = LatencyModel(LatencyCoefficients(**self.coefficients))
        return model.decode(TYPICAL_BATCH, TYPICAL_BATCH * TYPICAL_CONTEXT), model.prefill([TYPICAL_PROMPT])


def profile_vllm(urls: Sequence[str], kept: Path, quick: bool, resume: bool = False) -> Profiled:
    """Profile all servers at the same time, as they will serve, and store it at `kept`; `resume` reads it from there.

    QUICK measures for QUICK_BUDGET_S, stores that beside it, and compares: machines of one name differ (a processor
    without bfloat16 takes several times as long for a step).
    """
    if resume and kept.exists():
        return read_profile(kept)
    note("profiling the servers")
    limits = ProfilingLimits(MAX_NUM_SEQS, CONTEXT_TOKENS, budget_s=QUICK_BUDGET_S if quick else FULL_BUDGET_S)
    profile = asyncio.run(profile_engines(urls, MODEL_NAME, limits))
    path = kept.with_name(f"quick-{kept.name}") if quick else kept
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(profile.as_json(MODEL_NAME, urls), indent=1) + "\n")
    found = read_profile(path)
    if not quick:
        return found
    as_stored = kept.exists() and found.alike(read_profile(kept))
    if not as_stored:
        note("no stored profile holds on this machine: nothing else that was stored is used")
    return replace(found, as_stored=as_stored)


def read_profile(kept: Path) -> Profiled:
    """Raises FileNotFoundError."""
    raw = json.loads(kept.read_text())
    note(f"profile: {raw['coefficients']}, median errors {raw['fit']}")
    return Profiled(raw["coefficients"], raw["kv_capacity_tokens"])


def estimated_knee(fleet: StackFleet, tasks: Sequence[Task]) -> float:
    """Requests/s of all engines at KNEE_SHARE of the capacity that the profile gives for the mix's mean lengths."""
    if fleet.coefficients is None:
        raise ValueError("no profile to estimate a knee from")
    model = LatencyModel(LatencyCoefficients(**fleet.coefficients))
    rng = np.random.default_rng(0)
    seconds = []
    for task in tasks:
        prompt = statistics.fmean(task.prompt.draw(rng, 500).tolist())
        output = statistics.fmean(task.output.draw(rng, 500).tolist())
        step_s = model.marginal_decode(round(prompt + output / 2), fleet.max_num_seqs / 2)
        seconds.append(model.prefill([round(prompt)]) + output * step_s)
    return KNEE_SHARE * len(fleet.urls) / statistics.fmean(seconds)
