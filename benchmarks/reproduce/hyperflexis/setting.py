"""HyperFlexis' setting: models as latency profiles, its mixes, the compared schedulers, and one measured point."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.reproduce.hyperflexis.work import EngineWork, work_of
from controller.core.types import LatencyCoefficients
from controller.scale import ScalingConfig
from controller.simulator import (
    Demand,
    ElasticSettings,
    InstanceSettings,
    RunResult,
    Simulation,
    SimulationSettings,
)
from controller.simulator.experiment import Contender
from controller.simulator.workloads.mixes import MIXES, Task, demands

PROFILES = Path(__file__).resolve().parents[2] / "data" / "latency_profiles.json"
UNIT_S = 0.05  # one unit of cost: one instance for 50 ms (sec. 7.5)
LEVEL = 0.9
HIGHEST_RATE = 4096.0
SLOTS = 32  # sequences per engine, as in `make bench-vllm`; the paper gives none


@dataclass(frozen=True, slots=True)
class HyperFlexisModel:
    """One of its models.

    `slowed`: factor on the profile, so that HyperFlexis' knee on WikiSQL alone is that of its Fig. 7 (40 and 12
    requests/s). `load_s`: its Table 2.
    """

    name: str
    profile: str
    slowed: float
    load_s: Mapping[str, float]
    kv_tokens: int
    kv_bytes_per_token: int


def _load(device: float, host: float, disk: float) -> dict[str, float]:
    return {"device": device, "host": host, "disk": disk}


MODELS = {
    model.name: model
    for model in (
        HyperFlexisModel("Qwen7B", "aic/Qwen2.5-7B/A100-SXM-80GB/tp1", 1.13, _load(0.89, 2.73, 4.14), 989_816, 57_344),
        HyperFlexisModel(
            "Qwen32B", "aic/Qwen3-32B/A100-SXM-80GB/tp2", 1.29, _load(2.05, 19.41, 28.84), 299_377, 262_144
        ),
        HyperFlexisModel(
            "Llama70B", "splitwise/llama2-70b/a100-80gb/tp8", 1.0, _load(1.16, 11.5, 22.58), 1_327_209, 327_680
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Apart(Contender):
    """A scheduler for one engine on each engine, behind round robin: every n-th request belongs to it, and it does not
    see the other engines' queues.
    """


CREDITS = {"batching": "credit_based"}
CONTENDERS = {
    "round robin": Contender("round robin", "round_robin"),
    "engine priority by class": Contender("engine priority by class", "engine_priority_class"),
    "SCORPIO as published": Contender("SCORPIO as published", "scorpio", {}, CREDITS),
    "SCORPIO at its best": Contender(
        "SCORPIO at its best", "scorpio", {"admission": {"refuse": False, "margin_s": 0.2}}
    ),
    "SCORPIO behind round robin": Apart(
        "SCORPIO behind round robin", "scorpio", {"admission": {"refuse": False}}, CREDITS
    ),
    "hyperflexis (as printed)": Contender("hyperflexis (as printed)", "hyperflexis"),
    "slackline": Contender("slackline", "slackline"),
}
OURS = ("slackline", "hyperflexis (as printed)")


@cache
def coefficients(profile: str) -> LatencyCoefficients:
    found = {each["id"]: each for each in json.loads(PROFILES.read_text())["profiles"]}[profile]
    return LatencyCoefficients(*(float(found[part][key]) for part in ("prefill", "decode") for key in "abc"))


def instance(model: HyperFlexisModel, **changes: Any) -> InstanceSettings:
    """SLOTS sequences and 2,048 tokens per step, vLLM's batching, no prefix cache (prompts of the mixes share no
    prefixes).
    """
    latency = LatencyCoefficients(*(value * model.slowed for value in coefficients(model.profile)))
    settings = InstanceSettings(
        latency,
        kv_tokens=model.kv_tokens,
        max_num_seqs=SLOTS,
        kv_bytes_per_token=model.kv_bytes_per_token,
        prefix_caching=False,
        batching="vllm_v1",
    )
    return replace(settings, **changes)


def fleet(model: HyperFlexisModel, *, slots: int = SLOTS, **settings: Any) -> SimulationSettings:
    """Two workers."""
    return SimulationSettings((instance(model, max_num_seqs=slots),) * 2, **settings)


def growing(model: HyperFlexisModel, source: str = "device", **changes: Any) -> ElasticSettings:
    """Two workers that scale out to four.

    The paper gives no thresholds. These are the best of a sweep (`multitask.thresholds`): they attain as much as any,
    at a lower cost than those that scale out sooner and in later.
    """
    config = ScalingConfig(
        "model", min_instances=2, max_instances=4, upper=1.0, lower=0.5, sustain_s=2.0, cooldown_s=1.0
    )
    return ElasticSettings(replace(config, **changes), source, dict(model.load_s))


@dataclass(frozen=True, slots=True)
class Point:
    """Means over seeds. `cost` in units of 50 ms; `e2e_s` over answered requests, infinite if a run answers
    none; `answered`: their share. `by_class`: attainment, by SLO class in order of their names. `work`: what explains
    them.
    """

    attainment: float
    spread: float  # standard deviation over seeds
    e2e_s: float
    cost: float
    answered: float
    by_class: Mapping[str, float] = field(default_factory=dict)
    work: EngineWork = field(default_factory=EngineWork)
    results: tuple[RunResult, ...] = field(repr=False, default=())


def run(settings: SimulationSettings, contender: Contender, requests: Sequence[Demand]) -> RunResult:
    own = contender.settings(settings)
    if isinstance(contender, Apart):
        return _run_apart(own, contender, requests)
    migrator = contender.build_migrator() if own.disaggregated else None
    return Simulation(own, contender.build(), requests, migrator=migrator).run()


def _run_apart(settings: SimulationSettings, contender: Apart, requests: Sequence[Demand]) -> RunResult:
    """The workers' runs as one: all of them are provisioned until the last answer of any."""
    workers, in_order = len(settings.instances), sorted(requests, key=lambda demand: (demand.at, demand.id))
    alone = [
        Simulation(replace(settings, instances=(each,)), contender.build(), in_order[index::workers]).run()
        for index, each in enumerate(settings.instances)
    ]
    ended = max(result.ended_at for result in alone)
    return RunResult(
        contender.policy_set,
        records=[record for result in alone for record in result.records],
        instances=[use._replace(provisioned_s=ended) for result in alone for use in result.instances],
        ended_at=ended,
    )


def attainment(result: RunResult) -> float:
    return sum(record.attained for record in result.records) / len(result.records)


def by_class(results: Sequence[RunResult]) -> dict[str, float]:
    """Attainment of all runs together."""
    met: dict[str, list[bool]] = {}
    for result in results:
        for record in result.records:
            met.setdefault(record.slo_class, []).append(record.attained)
    return {name: statistics.fmean(each) for name, each in sorted(met.items())}


def measure(
    settings: SimulationSettings,
    contender: Contender,
    requests: Callable[[int], Sequence[Demand]],
    seeds: Sequence[int],
    *,
    keep: bool = False,
) -> Point:
    """`requests` by seed."""
    results = [run(settings, contender, requests(seed)) for seed in seeds]
    met = [attainment(result) for result in results]
    ended = [[record.e2e_s for record in result.records if record.e2e_s is not None] for result in results]
    return Point(
        attainment=statistics.fmean(met),
        spread=statistics.pstdev(met),
        e2e_s=statistics.fmean(statistics.fmean(times) if times else math.inf for times in ended),
        cost=statistics.fmean(result.cost / UNIT_S for result in results),
        answered=statistics.fmean(len(times) / len(r.records) for times, r in zip(ended, results, strict=True)),
        by_class=by_class(results),
        work=work_of(results),
        results=tuple(results) if keep else (),
    )


def of_mix(tasks: Sequence[Task], rate: float, per_task: int) -> Callable[[int], list[Demand]]:
    return lambda seed: demands(tasks, rate, seed, per_task=per_task)


def knee(
    settings: SimulationSettings,
    contender: Contender,
    tasks: Sequence[Task],
    per_task: int,
    seeds: Sequence[int],
    first: float = 1.0,
) -> float:
    """The highest rate (requests/s) at which mean attainment is at least LEVEL, within 3 %, searched from `first`.

    Raises ValueError if it holds at any rate, or at none.
    """

    def holds(rate: float) -> bool:
        return measure(settings, contender, of_mix(tasks, rate, per_task), seeds).attainment >= LEVEL

    low = first
    if not holds(low):
        raise ValueError(f"{contender.label} does not reach {LEVEL} at {low} requests/s")
    high = 2 * first
    while holds(high):
        low, high = high, 2 * high
        if high > HIGHEST_RATE:
            raise ValueError(
                f"{contender.label} holds {LEVEL} at any rate: {per_task} a task fit into the engines at once"
            )
    while high / low > 1.03:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@cache
def round_robin_knee(model: str, mix: str, per_task: int, seeds: tuple[int, ...]) -> float:
    """Round robin's 90 % point on two workers, requests/s; the loads of Fig. 3, 5, 8 and Table 2 are multiples of
    it.
    """
    return knee(fleet(MODELS[model]), CONTENDERS["round robin"], MIXES[mix], per_task, seeds)
