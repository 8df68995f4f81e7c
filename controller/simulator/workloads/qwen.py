"""FlowPrefill's workload: four kinds of requests of a production trace, each with its own targets.

"FlowPrefill: Decoupling Preemption from Prefill Scheduling Granularity", Table 1 (prompt lengths by kind, of the public
Qwen-Bailian usage trace, To-C, which is not shipped here) and Table 2 (TTFT by kind and model). This is a stand-in for
the trace. Lengths follow the distribution that matches Table 1's mean and deviation and comes closer to its P99 (gamma:
3,009, 16,767 and 24,158 tokens for text, search and file against 3,040, 16,635 and 22,390; lognormal: 2,512 for image
against 2,764), truncated at HIGH. Arrivals are renewal processes by kind: Poisson, or gamma with `cv` (the trace's own
are not in the paper). Output lengths are in neither table; where answers are decoded, those of Mooncake's public
conversation trace are used (mean 343, deviation 250).

Experiments name these mixes `qwen-<model>` (prefill only: one output token).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from controller.core.errors import UnknownName
from controller.core.types import Targets
from controller.simulator.workloads import mixes
from controller.simulator.workloads.arrivals import Lengths
from controller.simulator.workloads.demand import Demand
from controller.simulator.workloads.mixes import PATIENT_S, Task

HIGH = 60_000  # tokens; two in a million of the longest kind are longer
PROMPTS: Mapping[str, tuple[float, Lengths]] = MappingProxyType(
    {
        "text": (0.68, Lengths(590, 652, 1, HIGH, "gamma")),
        "image": (0.08, Lengths(532, 510, 1, HIGH, "lognormal")),
        "search": (0.20, Lengths(5976, 3456, 1, HIGH, "gamma")),
        "file": (0.04, Lengths(6833, 5186, 1, HIGH, "gamma")),
    }
)
TTFT_S: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "llama3-8b": {"text": 0.25, "image": 0.5, "search": 4.0, "file": 6.0},
        "qwen2.5-14b": {"text": 0.4, "image": 0.8, "search": 6.5, "file": 9.0},
        "llama3-70b": {"text": 1.0, "image": 2.0, "search": 15.0, "file": 18.0},
    }
)
TBT_S = {"text": 0.1, "image": 0.1, "search": 0.2, "file": 0.2}  # sec. 6.5, PD-colocation
ONE = Lengths(1, 0, 1, 1, "constant")
ANSWER = Lengths(343, 250, 1, 2000, "lognormal")


def tasks(model: str, slo_scale: float = 1.0, decode: bool = False, ttft_factor: float = 1.0) -> tuple[Task, ...]:
    """Table 1 and 2. `slo_scale` multiplies every TTFT (second row of Fig. 9).

    `decode`: with answers and TBT targets, for which the paper multiplies TTFT by `ttft_factor` 3.
    """
    if model not in TTFT_S:
        raise UnknownName(f"unknown model {model!r}; valid: {', '.join(sorted(TTFT_S))}", field="model")
    return tuple(
        Task(
            kind,
            Targets(TTFT_S[model][kind] * slo_scale * ttft_factor, TBT_S[kind], None, PATIENT_S),
            prompt,
            ANSWER if decode else ONE,
            share,
        )
        for kind, (share, prompt) in PROMPTS.items()
    )


def demands(chosen: Sequence[Task], rate: float, seed: int, count: int, cv: float = 1.0) -> list[Demand]:
    """About `count` requests at `rate` requests/s.

    The requests are the same at every rate, as when a trace is replayed at several speeds.
    """
    drawn = mixes.demands(chosen, 1.0, seed, duration_s=float(count), cv=cv)
    return [replace(demand, at=demand.at / rate) for demand in drawn]


MIXES = {f"qwen-{model}": tasks(model) for model in TTFT_S}
