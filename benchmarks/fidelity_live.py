"""The two sides of `make fidelity`: a run on real servers through the gateway, and the same arrivals simulated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines import CONTEXT_TOKENS, MAX_NUM_SEQS
from benchmarks.fidelity_compare import Seen
from benchmarks.loadgen import CUTOFF_S, gateway_target, run_plan
from benchmarks.profiled import Profiled
from benchmarks.trials import Bench, wait_idle
from benchmarks.workloads import FOUR_TASKS, Arrival, Task
from controller.core.types import LatencyCoefficients, Outcome, Targets
from controller.dispatch import build_dispatcher
from controller.predict.latency import LatencyModel
from controller.predict.latency_fit import Row
from controller.predict.latency_records import Served, intervals
from controller.predict.latency_refit import refit_profile
from controller.predict.latency_speed import Interval, speed_over_time
from controller.simulator.demand import Demand
from controller.simulator.machine_speed import MachineSpeed
from controller.simulator.settings import InstanceSettings, SimulationSettings
from controller.simulator.simulation import Simulation

VLLM_CPU_BATCH_TOKENS = 2048  # max_num_batched_tokens of its OpenAI server on a CPU, which our servers leave as it is
GATEWAY_PROGRESS_S = 0.05  # api.openai.runtime.PROGRESS_S
GATEWAY_TELEMETRY_S = 1.0  # TELEMETRY_PERIOD_S
PROBE_TOKENS, PROBES, PROBE_GAP_S = 64, 24, 0.4
SPEED_PERIOD_S = 0.25  # shorter ones hold too few ends of intervals to tell them apart
NOBODY_WAITS = 3600.0  # the seeded classes' waiting_time


@dataclass(frozen=True, slots=True)
class RealRun:
    """`requests`: one [first, last, finished, instance] a request of the plan in its order; seconds after the start,
    `first` and `last` None where no token came. `ended`: when the run was cut or ended."""

    requests: Sequence[Sequence[Any]]
    ended: float
    largest_gap_s: float = 0.0
    way_s: float = 0.0  # of a run that only measured the way
    refused: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


def measured(bench: Bench, policy: str, plan: Sequence[Arrival]) -> RealRun:
    """Through a fresh gateway with this policy set, repeated while the machine stalls."""

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


def seen(run: RealRun, plan: Sequence[Arrival], tasks: Sequence[Task]) -> Seen:
    """Attainment as bench-vllm judges it. Raises ValueError where run and plan do not belong together."""
    met: dict[str, list[bool]] = {task.name: [] for task in tasks}
    ttfts: list[float] = []
    for arrival, (first, last, finished, _) in zip(plan, run.requests, strict=True):
        ttfts.append((run.ended if first is None else first) - arrival.at)
        tpot = (last - first) / (arrival.output_tokens - 1) if finished and arrival.output_tokens > 1 else 0.0
        met[arrival.task.name].append(
            bool(finished) and ttfts[-1] <= arrival.task.targets.ttft_s and tpot <= arrival.task.targets.tpot_s
        )
    everyone = [each for of in met.values() for each in of]
    by_class = {name: round(statistics.fmean(of), 4) for name, of in met.items() if of}
    return Seen(statistics.fmean(everyone), by_class, ttfts)


def overhead_s(bench: Bench, profile: LatencyCoefficients) -> RealRun:
    """One way between gateway and engine (`way_s`): single short requests to idle engines, one after the other."""
    task = FOUR_TASKS[0]
    plan = [
        Arrival(PROBE_GAP_S * i, task, tuple(3 + (7 * i + k) % 1000 for k in range(PROBE_TOKENS)), 2)
        for i in range(PROBES)
    ]
    run = measured(bench, "round_robin", plan)
    firsts = [row[0] - arrival.at for arrival, row in zip(plan, run.requests, strict=True) if row[0] is not None]
    alone = LatencyModel(profile).prefill([PROBE_TOKENS])
    way = max(0.0, statistics.median(firsts[2:]) - alone) / 2
    return RealRun(run.requests, run.ended, run.largest_gap_s, way, notes={"prefill_alone_s": alone})


def read_at_once(run: RealRun, plan: Sequence[Arrival]) -> float:
    """Share of the answers of several tokens whose tokens were all read at one moment: the load generator, or the
    gateway, was late by a whole answer, and first tokens say little of the engines. 0..1."""
    ended = [
        (first, last)
        for arrival, (first, last, ok, _) in zip(plan, run.requests, strict=True)
        if ok and arrival.output_tokens > 1
    ]
    return sum(first == last for first, last in ended) / len(ended) if ended else 0.0


def _decoded(run: RealRun, plan: Sequence[Arrival]) -> dict[str, list[tuple[Served, Row]]]:
    """By engine: finished requests whose tokens came one after the other, with what was done between first and last."""
    by_engine: dict[str, list[Served]] = {}
    for arrival, (first, last, finished, instance) in zip(plan, run.requests, strict=True):
        if finished and arrival.output_tokens > 1 and last > first:
            served = Served(len(arrival.prompt), arrival.output_tokens, first, last)
            by_engine.setdefault(instance, []).append(served)
    return {
        name: [(each, row) for each, (row, _) in zip(served, intervals(served, served), strict=True)]
        for name, served in by_engine.items()
    }


def refitted(
    runs: Sequence[tuple[RealRun, Sequence[Arrival]]], profile: LatencyCoefficients
) -> tuple[LatencyCoefficients, MachineSpeed]:
    """Step times while everything runs, from the records of calibration runs with their plans, and how the machine's
    speed varied around them, run after run. Raises ConfigError where the records are too few."""
    decoded = [_decoded(run, plan) for run, plan in runs]
    rows = [(row, each.last_at - each.first_at) for of in decoded for pairs in of.values() for each, row in pairs]
    fit = refit_profile(rows, profile)
    series: dict[str, list[float]] = {name: [] for of in decoded for name in of}
    for of in decoded:
        speeds = {name: speed_over_time(_work(pairs, fit), SPEED_PERIOD_S) for name, pairs in of.items()}
        longest = max(map(len, speeds.values()))
        for name in series:  # a series each, of the same moments
            known = speeds.get(name, [])
            series[name] += [*known, *[1.0] * (longest - len(known))]
    return fit, MachineSpeed(tuple(tuple(series[name]) for name in sorted(series)), SPEED_PERIOD_S)


def _work(pairs: Sequence[tuple[Served, Row]], fit: LatencyCoefficients) -> list[Interval]:
    return [Interval(each.first_at, each.last_at, work_s(fit, row)) for each, row in pairs]


def work_s(fit: LatencyCoefficients, row: Row) -> float:
    """Seconds that the steps of one decode interval take by the model."""
    factors = (fit.decode_a, fit.decode_b, fit.decode_c, fit.prefill_b, fit.prefill_c)
    return sum(value * factor for value, factor in zip(row, factors, strict=True))


def simulated(
    plan: Sequence[Arrival],
    policy: str,
    truth: LatencyCoefficients,
    profiled: Profiled,
    way_s: float,
    speed: MachineSpeed | None = None,
) -> RealRun:
    """The same arrivals in the simulator, in the form of a real run. `speed` None: every step as `truth` has it."""
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
