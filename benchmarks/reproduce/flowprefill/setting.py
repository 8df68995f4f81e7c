"""FlowPrefill's setting in the simulator: models, compared engines, and the two searches that every figure needs.

There is one prefill instance, whose time to first token is the paper's metric; its decode instance never delays a
prefill. The requests are the same at every rate, with their arrivals stretched (a trace replayed at several speeds).
Arrivals of each kind are a gamma renewal process with CV 1.3, as published by the same provider (ServeGen, multimodal
pool 1.31), since the trace's own are not available.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from benchmarks.reproduce.claims import PRINTED, Claim, Plot, Table, Value
from controller.core.types import LatencyCoefficients
from controller.dispatch import build_dispatcher
from controller.predict.operator_profile import OperatorProfile
from controller.simulator import Demand, InstanceSettings, Simulation, SimulationSettings
from controller.simulator.report.results import RunResult
from controller.simulator.workloads import qwen

LEVEL = 0.9
FINEST = 0.03  # of a rate or a scale, at which a search ends
CV = 1.3
PAPER = "flowprefill"
Rows = list[list[Value]]


class SectionPart(NamedTuple):
    """What one group of figures adds to the section."""

    claims: list[Claim]
    tables: list[Table]
    plots: list[Plot]


@dataclass(frozen=True, slots=True)
class Size:
    """`count`: requests per run (the paper's code replays two minutes of the trace). One run per seed."""

    count: int
    seeds: tuple[int, ...]
    quick: bool


@dataclass(frozen=True, slots=True)
class FlowPrefillModel:
    """`slo`: whose targets of Table 2. `shape`: whose operators, unless `operators` has measured ones.

    Kernel-composed profiles of A100-SXM-80GB stand for the paper's A800 (the same device with slower links).
    `all_reduce_share`: share of the profile's linear time in two all-reduces per layer, at the rate that vidur measured
    for 67 MB on A100 (TP 2: 156 GB/s, TP 4: 111 GB/s).
    """

    name: str
    slo: str
    shape: str
    latency: LatencyCoefficients
    kv_tokens: int
    profile: str
    all_reduce_share: float = 0.0
    operators: OperatorProfile | None = None


# Not measured anywhere here: the 8B model's profile at TP 2, its linear part scaled by active parameters (2.9 of 7.5
# billion) at half the efficiency (grouped expert kernels), attention and constant by layers.
MOE = FlowPrefillModel(
    "Qwen3-30B-A3B",
    "llama3-8b",
    "qwen3-30b-a3b",
    LatencyCoefficients(6.1e-3, 2.57e-5, 1.06e-9, 9e-3, 5e-8, 3e-5),
    800_000,
    "composed from FLOP and byte shares of Llama-3.1-8B TP 2",
)
MODELS = {
    "Llama3-8B": FlowPrefillModel(
        "Llama3-8B",
        "llama3-8b",
        "llama3-8b",
        LatencyCoefficients(6.6252e-3, 5.5413e-5, 1.521e-9, 1.15e-2, 8.2e-8, 3.66e-5),
        426_000,
        "Llama-3.1-8B, TP 1",
    ),
    "Qwen2.5-14B": FlowPrefillModel(
        "Qwen2.5-14B",
        "qwen2.5-14b",
        "qwen2.5-14b",
        LatencyCoefficients(8.5313e-3, 6.0014e-5, 1.2608e-9, 1.2032e-2, 6.3455e-8, 3.7237e-5),
        582_000,
        "Qwen2.5-14B, TP 2",
        0.105,
    ),
    "Llama3-70B": FlowPrefillModel(
        "Llama3-70B",
        "llama3-70b",
        "llama3-70b",
        LatencyCoefficients(1.9626e-2, 1.5099e-4, 1.7035e-9, 2.76e-2, 5.68e-8, 9.99e-5),
        448_000,
        "Llama-3.1-70B, TP 4",
        0.156,
    ),
}


@dataclass(frozen=True, slots=True)
class EngineContender:
    """A dispatcher's policy and changes of the prefill instance."""

    label: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    policy_set: str = "round_robin"


def flowprefill(
    label: str = "FlowPrefill", preemption: Mapping[str, Any] | None = None, **rules: Any
) -> EngineContender:
    return EngineContender(
        label,
        {
            "engine_kind": "preemptive_prefill",
            "batching": "slo_aware_batching",
            "batching_settings": rules,
            "preemption": preemption or {},
        },
    )


def distserve(budget: int) -> EngineContender:
    """First come, first served, whole prompts; several per step if they fit the budget."""
    engine = {"batching": "iteration_level", "scheduling_policy": "fcfs", "max_num_batched_tokens": budget}
    return EngineContender(
        f"DistServe, {budget} tokens a step" if budget > 256 else "DistServe, one prompt a step", engine
    )


def chunked(tokens: int, ordering: str = "edf", label: str = "") -> EngineContender:
    engine = {
        "batching": "ordered_chunks",
        "batching_settings": {"ordering": ordering},
        "max_num_batched_tokens": tokens,
    }
    return EngineContender(label or f"DistServe-CP{tokens / 1024:g}K", engine)


def class_priority(tokens: int = 2048) -> EngineContender:
    """What is available today: vLLM's scheduler with a priority for each class, tightest first."""
    engine = {"batching": "vllm_v1", "max_num_batched_tokens": tokens}
    return EngineContender(f"vLLM, class priority, {tokens // 1024}K", engine, "engine_priority_class")


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """What is replayed: `slo_scale` times Table 2, `count` requests, one run per seed."""

    model: FlowPrefillModel
    count: int
    seeds: tuple[int, ...]
    cv: float = CV
    slo_scale: float = 1.0

    def demands(self, rate: float, seed: int) -> list[Demand]:
        return qwen.demands(qwen.tasks(self.model.slo, self.slo_scale), rate, seed, self.count, self.cv)


def instance(model: FlowPrefillModel, contender: EngineContender) -> InstanceSettings:
    base = InstanceSettings(
        model.latency,
        kv_tokens=model.kv_tokens,
        max_num_seqs=256,
        max_model_len=65_536,
        block_size=256,
        prefix_caching=False,
        model_shape=model.shape,
        all_reduce_share=model.all_reduce_share,
        operators=model.operators,
    )
    return replace(base, **contender.engine)


def run(contender: EngineContender, model: FlowPrefillModel, demands: Sequence[Demand]) -> tuple[RunResult, Simulation]:
    settings = SimulationSettings((instance(model, contender),), sample_s=1e6, progress_s=1e6, telemetry_period_s=1e6)
    simulation = Simulation(settings, build_dispatcher(contender.policy_set), demands)
    return simulation.run(), simulation


class PrefillBench:
    """Runs each (contender, load, rate) once; all rates that the searches tried are available for the curves."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, OfferedLoad, float], list[float]] = {}

    def _shares(
        self, contender: EngineContender, load: OfferedLoad, rate: float, enough: Callable[[list[float]], bool]
    ) -> list[float]:
        """Share of requests with their first token in time, by seed, for as many seeds as needed."""
        shares = self._seen.setdefault((contender.label, load, rate), [])
        while len(shares) < len(load.seeds) and not enough(shares):
            result, _ = run(contender, load.model, load.demands(rate, load.seeds[len(shares)]))
            shares.append(statistics.fmean(record.ttft_met for record in result.records))
        return shares

    def attainment(self, contender: EngineContender, load: OfferedLoad, rate: float) -> float:
        """The median over all seeds."""
        return statistics.median(self._shares(contender, load, rate, lambda shares: False))

    def holds(self, contender: EngineContender, load: OfferedLoad, rate: float) -> bool:
        """Whether the median is at the level; seeds that cannot change that any more are not run."""
        most = len(load.seeds) // 2 + 1

        def decided(shares: list[float]) -> bool:
            above = sum(share >= LEVEL for share in shares)
            return above >= most or len(shares) - above >= most

        return statistics.median(self._shares(contender, load, rate, decided)) >= LEVEL

    def curve(self, contender: EngineContender, load: OfferedLoad) -> list[tuple[float, float]]:
        """Median attainment at every rate tried so far, over the seeds that were run there."""
        label = contender.label
        return sorted(
            (rate, statistics.median(shares))
            for (name, tried, rate), shares in self._seen.items()
            if name == label and tried == load
        )

    def goodput(self, contender: EngineContender, load: OfferedLoad, first: float) -> float:
        """The highest rate at 90 % attainment, requests/s: the paper's goodput."""
        return highest(lambda rate: self.holds(contender, load, rate), first)

    def tightest(self, contender: EngineContender, load: OfferedLoad, rate: float, first: float = 1.0) -> float:
        """The smallest SLO scale at 90 % attainment at a fixed rate."""
        return 1 / highest(lambda x: self.holds(contender, replace(load, slo_scale=1 / x), rate), 1 / first)

    def scales(self, contender: EngineContender, load: OfferedLoad, rate: float) -> list[tuple[float, float]]:
        """Attainment at every SLO scale tried so far at this rate."""
        found = [
            (tried.slo_scale, statistics.median(shares))
            for (name, tried, at), shares in self._seen.items()
            if name == contender.label and at == rate and replace(tried, slo_scale=load.slo_scale) == load
        ]
        return sorted(found)


def highest(holds: Callable[[float], bool], first: float) -> float:
    """The highest value at which it still holds, to FINEST; it holds at small values and not at large ones."""
    low = high = first
    if holds(first):
        while holds(high := low * 1.5):
            low = high
    else:
        while not holds(low := high / 1.5):
            high = low
    while high / low > 1 + FINEST:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def claimed(
    figure: str,
    text: str,
    theirs: float | None,
    ours: float,
    size: Size,
    setting: str,
    reason: str = "",
    verdict: str = PRINTED,
) -> Claim:
    """Reached if ours is at least theirs, or more than 1 if the paper gives only a direction (a tie is no gain) or does
    not have the baseline.
    """
    reached = ours >= theirs if theirs is not None else round(ours, 3) > 1.0
    bar = None if theirs is not None else 1.0
    return Claim(
        PAPER, figure, text, theirs, round(ours, 3), reached, setting, list(size.seeds), reason, verdict=verdict,
        bar=bar,
    )  # fmt: skip
