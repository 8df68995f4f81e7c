"""The two sides of `make fidelity`: a run on real servers through the gateway, and the same arrivals simulated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fidelity.compare import SeenRun
from benchmarks.load.generator import CUTOFF_S, gateway_target, run_plan
from benchmarks.load.trials import Bench, wait_idle
from benchmarks.load.workloads import FOUR_TASKS, PlannedArrival, Task
from benchmarks.servers.engines import CONTEXT_TOKENS, MAX_NUM_SEQS
from benchmarks.vllm.profiled import Profiled
from controller.core.types import LatencyCoefficients, Outcome, Targets
from controller.dispatch import build_dispatcher
from controller.predict.latency import LatencyModel
from controller.simulator.machine_speed import MachineSpeed
from controller.simulator.settings import InstanceSettings, SimulationSettings
from controller.simulator.simulation import Simulation
from controller.simulator.workloads.demand import Demand

VLLM_CPU_BATCH_TOKENS = 2048  # default max_num_batched_tokens of vLLM's OpenAI server on a CPU
GATEWAY_PROGRESS_S = 0.05  # api.openai.runtime.PROGRESS_S
GATEWAY_TELEMETRY_S = 1.0  # TELEMETRY_PERIOD_S
PROBE_TOKENS, PROBES, PROBE_GAP_S = 64, 24, 0.4
NOBODY_WAITS = 3600.0  # the seeded classes' waiting_time


@dataclass(frozen=True, slots=True)
class RealRun:
    """One real run.

    `requests`: [first, last, finished, instance] of each request of the plan, in its order; seconds after the start,
    `first` and `last` None if no token came. `ended`: when the run was cut or ended.
    """

    requests: Sequence[Sequence[Any]]
    ended: float
    largest_gap_s: float = 0.0
    way_s: float = 0.0  # for a run that only measured the time between gateway and engine
    refused: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


def measured(bench: Bench, policy: str, plan: Sequence[PlannedArrival]) -> RealRun:
    """A run through a new gateway with this policy set, repeated if the machine stalled."""

    def once() -> RealRun:
        wait_idle(bench.stack.fleet.urls)
        with bench.stack.gateway(policy, {}) as gateway:
            run = run_plan(plan, gateway_target(gateway.url, bench.stack.fleet.model, bench.stack.api_key))
        rows = [[_time(s.first), _time(s.last), s.outcome == "ok", s.instance] for s in run.samples]
        refused = sum(s.outcome in ("refused", "failed") for s in run.samples)
        return RealRun(rows, run.ended, run.largest_gap_s, refused=refused)

    found: RealRun = bench.undisturbed(once)
    return found


def _time(at: float) -> float | None:
    return None if math.isnan(at) else round(at, 6)


def seen(run: RealRun, plan: Sequence[PlannedArrival], tasks: Sequence[Task]) -> SeenRun:
    """Attainment as bench-vllm judges it. Raises ValueError if run and plan do not belong together."""
    met: dict[str, list[bool]] = {task.name: [] for task in tasks}
    waited = ttfts(run, plan)
    for arrival, ttft, (first, last, finished, _) in zip(plan, waited, run.requests, strict=True):
        tpot = (last - first) / (arrival.output_tokens - 1) if finished and arrival.output_tokens > 1 else 0.0
        met[arrival.task.name].append(
            bool(finished) and ttft <= arrival.task.targets.ttft_s and tpot <= arrival.task.targets.tpot_s
        )
    everyone = [each for of in met.values() for each in of]
    by_class = {name: round(statistics.fmean(of), 4) for name, of in met.items() if of}
    return SeenRun(statistics.fmean(everyone), by_class, waited)


def ttfts(run: RealRun, plan: Sequence[PlannedArrival]) -> list[float]:
    """Seconds, one per request; without a token, the time it had waited at the end. Errors as `seen`."""
    return [
        (run.ended if first is None else first) - arrival.at
        for arrival, (first, *_) in zip(plan, run.requests, strict=True)
    ]


def overhead_s(bench: Bench, profile: LatencyCoefficients) -> RealRun:
    """One way between gateway and engine (`way_s`), from single short requests to idle engines, one after the other."""
    task = FOUR_TASKS[0]
    plan = [
        PlannedArrival(PROBE_GAP_S * i, task, tuple(3 + (7 * i + k) % 1000 for k in range(PROBE_TOKENS)), 2)
        for i in range(PROBES)
    ]
    run = measured(bench, "round_robin", plan)
    firsts = [row[0] - arrival.at for arrival, row in zip(plan, run.requests, strict=True) if row[0] is not None]
    alone = LatencyModel(profile).prefill([PROBE_TOKENS])
    way = max(0.0, statistics.median(firsts[2:]) - alone) / 2
    return RealRun(run.requests, run.ended, run.largest_gap_s, way, notes={"prefill_alone_s": alone})


def read_at_once(run: RealRun, plan: Sequence[PlannedArrival]) -> float:
    """Share (0..1) of the answers of several tokens whose tokens were all read at one moment.

    For these the load generator or the gateway was late by a whole answer, so first tokens say little about the
    engines.
    """
    ended = [
        (first, last)
        for arrival, (first, last, ok, _) in zip(plan, run.requests, strict=True)
        if ok and arrival.output_tokens > 1
    ]
    return sum(first == last for first, last in ended) / len(ended) if ended else 0.0


def simulated(
    plan: Sequence[PlannedArrival],
    policy: str,
    truth: LatencyCoefficients,
    profiled: Profiled,
    way_s: float,
    speed: MachineSpeed | None = None,
) -> RealRun:
    """The same arrivals in the simulator, in the form of a real run.

    `speed` None: every step takes the time of `truth`.
    """
    engine = InstanceSettings(
        truth,
        kv_tokens=profiled.kv_capacity_tokens or 131_072,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=VLLM_CPU_BATCH_TOKENS,
        max_model_len=CONTEXT_TOKENS,
        prefix_caching=False,
        batching="vllm_v1",
        believed=LatencyCoefficients(**profiled.coefficients),
    )
    settings = SimulationSettings(
        (engine, engine),
        telemetry_period_s=GATEWAY_TELEMETRY_S,
        progress_s=GATEWAY_PROGRESS_S,
        network_s=way_s,
        cutoff_s=CUTOFF_S,
        machine_speed=speed,
    )
    demands = [
        Demand(
            f"{index:06}", arrival.at, len(arrival.prompt), arrival.output_tokens,
            Targets(arrival.task.targets.ttft_s, arrival.task.targets.tpot_s, None, NOBODY_WAITS), arrival.task.name,
            max_tokens=arrival.output_tokens,
        )
        for index, arrival in enumerate(plan)
    ]  # fmt: skip
    result = Simulation(settings, build_dispatcher(policy), demands).run()
    rows: list[list[Any]] = [[None, None, False, ""] for _ in plan]
    for record in result.records:
        if record.ttft_s is not None:
            first = record.at + record.ttft_s
            last = first + (record.tpot_s or 0.0) * (record.output_tokens - 1)
            rows[int(record.id)] = [first, last, record.outcome is Outcome.OK, record.instance]
    return RealRun(rows, result.ended_at)
