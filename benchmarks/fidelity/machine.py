"""The machine of the measured runs, as their records show it: step times, scatter, and the time to an engine and
back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from benchmarks.fidelity.live import RealRun, simulated, ttfts
from benchmarks.load.scoring import percentile
from benchmarks.load.workloads import PlannedArrival
from benchmarks.vllm.profiled import Profiled
from controller.core.types import LatencyCoefficients
from controller.predict.latency_fit import Row
from controller.predict.latency_records import Served, intervals
from controller.predict.latency_refit import refit_profile
from controller.predict.latency_speed import Interval, speed_over_time
from controller.simulator.machine_speed import MachineSpeed

SPEED_PERIOD_S = 0.25  # shorter periods contain too few ends of intervals
NOT_QUEUED_S = 0.5  # a later first token depends more on the queue than on the time between gateway and engine
FEWEST = 50  # least number of requests that did not queue, for an estimate
PREFILL_FACTORS = (1.0, 1.2, 1.4, 1.6, 2.0)
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
AMPLITUDES = (1.0, 0.75, 0.5, 0.25)
LEFT_OUT_SEEDS = (1, 2, 3, 4, 5)


class KnownMachine(NamedTuple):
    """A run from which the machine is known."""

    run: RealRun
    plan: Sequence[PlannedArrival]
    policy: str


class Machine(NamedTuple):
    """Step times, speed and distance of one machine.

    `speed`: over the runs from which it is known, one after the other (None: always as `latency` says), with its
    logarithm scaled by `amplitude`. `way_s`: one way between gateway and engine.
    """

    latency: LatencyCoefficients
    speed: MachineSpeed | None
    way_s: float
    amplitude: float = 1.0


def machine_of(known: Sequence[KnownMachine], profiled: Profiled, way_s: float) -> Machine:
    """The machine of these runs. `way_s`: that of idle engines. Raises ConfigError if there are too few records.

    On a machine that pauses, decode intervals do not separate prompts from steps well (`latency_refit`) and keep the
    profile's proportion. First tokens do: of PREFILL_FACTORS on the profile's prefill, the one is used whose simulation
    of the same runs has the nearest quantiles of TTFT. A speed over time explains its own run, including the errors of
    the model, which are noise in other runs. Of AMPLITUDES, the one is used with which the other runs' speeds, begun at
    random moments, best predict the quantiles of TTFT of each run. A single run keeps its measured speed.
    """
    fits = [_with_prefill(factor, known, profiled, way_s) for factor in PREFILL_FACTORS]
    _, latency, speeds, busy_s = min(fits, key=lambda fit: fit[0])
    amplitude = 1.0
    if len(known) > 1:
        amplitude = min(AMPLITUDES, key=lambda size: _left_out(known, latency, speeds, profiled, busy_s, size))
    return Machine(latency, _damped(_joined(speeds), amplitude), busy_s, amplitude)


def _with_prefill(
    factor: float, known: Sequence[KnownMachine], profiled: Profiled, way_s: float
) -> tuple[float, LatencyCoefficients, list[MachineSpeed], float]:
    """The distance of the quantiles of TTFT from the real ones; step times, speeds by run, and the time to busy
    engines.
    """
    profile = LatencyCoefficients(**profiled.coefficients)
    shape = profile._replace(prefill_b=factor * profile.prefill_b, prefill_c=factor * profile.prefill_c)
    latency, speeds = refitted(known, shape)

    def told(way_s: float) -> list[RealRun]:
        """The runs simulated, with their own speeds at their own moments."""
        return [
            simulated(each.plan, each.policy, latency, profiled, way_s, speed)
            for each, speed in zip(known, speeds, strict=True)
        ]

    busy_s = busy_way_s(known, told(way_s), way_s)
    far = statistics.fmean(apart(each, [one]) for each, one in zip(known, told(busy_s), strict=True))
    return far, latency, speeds, busy_s


def _left_out(
    known: Sequence[KnownMachine],
    latency: LatencyCoefficients,
    speeds: Sequence[MachineSpeed],
    profiled: Profiled,
    way_s: float,
    amplitude: float,
) -> float:
    """How far the quantiles of TTFT of each run are from the prediction by the other runs' speeds."""
    far = []
    for at, each in enumerate(known):
        others = _damped(_joined([speed for other, speed in enumerate(speeds) if other != at]), amplitude)
        told = [
            simulated(each.plan, each.policy, latency, profiled, way_s, others.drawn(seed)) for seed in LEFT_OUT_SEEDS
        ]
        far.append(apart(each, told))
    return statistics.fmean(far)


def _joined(speeds: Sequence[MachineSpeed]) -> MachineSpeed:
    """An engine's series of one run followed by that of the other."""
    series = zip(*(speed.series for speed in speeds), strict=True)
    return MachineSpeed(tuple(tuple(chain.from_iterable(of)) for of in series), SPEED_PERIOD_S)


def _damped(speed: MachineSpeed, amplitude: float) -> MachineSpeed:
    """Each speed to the power of `amplitude`; the total work stays the same."""
    series = []
    for measured in speed.series:
        powers = [value**amplitude for value in measured]
        level = sum(measured) / sum(powers)
        series.append(tuple(level * power for power in powers))
    return replace(speed, series=tuple(series))


def apart(known: KnownMachine, told: Sequence[RealRun]) -> float:
    """Mean over QUANTILES of |ln(predicted / real)| of TTFT, with the median of several simulations."""
    real, *ours = (ttfts(run, known.plan) for run in (known.run, *told))
    return statistics.fmean(
        abs(statistics.median(math.log(percentile(of, q) / percentile(real, q)) for of in ours)) for q in QUANTILES
    )


def busy_way_s(known: Sequence[KnownMachine], told: Sequence[RealRun], way_s: float) -> float:
    """One way between gateway and engine while both work. `told`: the runs simulated with `way_s`, that of idle
    engines.

    An engine's HTTP server uses the cores that compute its steps, so requests and tokens take longer then. Half of the
    additional time of first tokens, at the median of requests that hardly queued, is added; nothing if there are fewer
    than FEWEST of them.
    """
    late: list[float] = []
    for each, simulation in zip(known, told, strict=True):
        for arrival, (first, *_), (expected, *_) in zip(each.plan, each.run.requests, simulation.requests, strict=True):
            if first is not None and expected is not None and (first + expected) / 2 - arrival.at <= NOT_QUEUED_S:
                late.append(first - expected)
    return way_s + max(0.0, statistics.median(late)) / 2 if len(late) >= FEWEST else way_s


def _decoded(run: RealRun, plan: Sequence[PlannedArrival]) -> dict[str, list[tuple[Served, Row]]]:
    """By engine: finished requests whose tokens came one after the other, with the work between first and last
    token.
    """
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
    known: Sequence[KnownMachine], profile: LatencyCoefficients
) -> tuple[LatencyCoefficients, list[MachineSpeed]]:
    """Step times under load, from the records of runs, and the speed of the machine over each run from its start.

    Raises ConfigError if there are too few records.
    """
    decoded = [_decoded(each.run, each.plan) for each in known]
    rows = [(row, each.last_at - each.first_at) for of in decoded for pairs in of.values() for each, row in pairs]
    fit = refit_profile(rows, profile)
    names = sorted({name for of in decoded for name in of})
    return fit, [_speeds(of, names, fit) for of in decoded]


def _speeds(of: dict[str, list[tuple[Served, Row]]], names: Sequence[str], fit: LatencyCoefficients) -> MachineSpeed:
    """One series per engine, of the same moments; engines without records run as fitted."""
    speeds = {name: speed_over_time(_work(pairs, fit), SPEED_PERIOD_S) for name, pairs in of.items()}
    longest = max(map(len, speeds.values()))
    series = [speeds.get(name, []) for name in names]
    return MachineSpeed(tuple((*known, *[1.0] * (longest - len(known))) for known in series), SPEED_PERIOD_S)


def _work(pairs: Sequence[tuple[Served, Row]], fit: LatencyCoefficients) -> list[Interval]:
    return [Interval(each.first_at, each.last_at, work_s(fit, row)) for each, row in pairs]


def work_s(fit: LatencyCoefficients, row: Row) -> float:
    """Seconds of the steps of one decode interval, by the model."""
    factors = (fit.decode_a, fit.decode_b, fit.decode_c, fit.prefill_b, fit.prefill_c)
    return sum(value * factor for value, factor in zip(row, factors, strict=True))
