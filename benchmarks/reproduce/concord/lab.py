"""Concord's setting and its runs: systems by name, one engine of Llama-3.1-8B on an A100, programs at a rate."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reproduce.claims import Progress
from benchmarks.reproduce.concord import training
from controller.core.types import LatencyCoefficients
from controller.dispatch import build_dispatcher
from controller.policies.batching import BATCHINGS, Pausing
from controller.predict.latency import LatencyModel
from controller.simulator import InstanceSettings, RunResult, Simulation, SimulationSettings
from controller.simulator.__main__ import read_profile, read_trace
from controller.simulator.report.results import ProgramRecord
from controller.simulator.workloads.analyser import Exchanged, Trained, TrainedAnalyser
from controller.simulator.workloads.arrivals import renewal_times
from controller.simulator.workloads.concord_mix import ConcordMix
from controller.simulator.workloads.foresight import Blind, BlindToStages, Noisy, Oracle
from controller.simulator.workloads.programs import Foresight, Programs, Speeds
from controller.simulator.workloads.stage_pace import StagePace
from controller.slo.attainment import quantile

ROOT = Path(__file__).resolve().parents[3]
PROFILE = ROOT / "workers/engine/profiles.json"
PROFILE_ID = "llama-3.1-8b-a100"
TRACE = ROOT / "benchmarks/data/azure2023_conv.csv.gz"
KV_TOKENS = 426_784  # of an 80 GB A100, as estimated with the profile
PATIENCE_S = 120.0  # after the last arrival; longer than any deadline
PAUSED = 4  # sequences per slot that may hold KV, for policies that pause
MEAN_OUTPUT, MEAN_TOKENS = 320, 4_300.0  # of a call and of a program: assumed without a predictor


RECORDED = 700  # programs an engine of the run that pattern graphs are recorded from
NEVER = 10**9  # steps
FULL_BATCH = 96  # sequences of 1,000 tokens each: the pace to which that of stages is compared
MIX = ConcordMix()
PER_REQUEST = 1e-3  # requests per token: scales CALM's starvation constant if goodput is counted in requests


@dataclass(frozen=True, slots=True)
class System:
    """One of the compared systems.

    `policy`: the dispatcher's set. `foresight`: predictions of lengths and graphs: "trained", "noisy", "oracle",
    "blind" or "blind_to_stages". `exchanged`: what trained predictions are exchanged for the truth. `rule`: divides a
    deadline among stages.
    `history`: how many times longer stages took in the past, under load, than their tokens take in a full batch (None:
    learned during the run).
    """

    name: str
    batching: str
    slots: int
    budget: int = 512
    settings: Mapping[str, Any] = field(default_factory=dict)
    foresight: str = "noisy"
    policy: str = "round_robin"
    history: float | None = None
    exchanged: tuple[str, ...] = ()
    rule: str = "accumulated"

    def variant(self, **changes: Any) -> System:
        return replace(self, **changes)

    @property
    def text(self) -> str:
        given = {key: "never" if value == NEVER else value for key, value in self.settings.items()}
        more = "".join(f", {key} {value}" for key, value in given.items())
        past = ""
        if self.batching == "calm":
            past = ", history learned" if self.history is None else f", history x {self.history:g}"
        if self.foresight == "trained":
            past = f", stages by {self.rule}"
        return f"{self.slots} slots, {self.budget} tokens a step{more}{past}"


CONCORD = System("Concord (CALM)", "calm", 96, settings={"rectangles": True})
WHOLE_SLOTS = System("Concord, whole slots", "calm", 96, settings={"cutoffs": (0.8, 0.9, 0.95, 1.0)})
TRAINED = CONCORD.variant(foresight="trained", rule="share_of_rest")
ORACLE = CONCORD.variant(name="Concord, oracle", foresight="oracle")
BLIND = CONCORD.variant(name="Concord without analyser", foresight="blind")
BLIND_TO_STAGES = CONCORD.variant(
    name="Concord without analyser, nor told the number of stages", foresight="blind_to_stages"
)
LTR = System("LTR", "learned_rank", 128)
AUTELLIX = System("Autellix", "least_attained_service", 128)
SARATHI = System("Sarathi-Serve", "chunked_prefill", 256)
VLLM = System("vLLM", "vllm_v1", 256, 2048)
EDF = System("EDF", "earliest_deadline_first", 96)
SJF = System("Concord without CALM (SJF)", "shortest_job_first", 128)
BY_CLASS = System("engine priority by class", "chunked_prefill", 256, policy="engine_priority_class")


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `rate`: programs/s of all engines. `count`: what goodput is counted in. `cv` None: the trace's gaps.
    `trained_on`: other programs than those of `mix` (None: other seeds of it), for a trained analyser.
    """

    rate: float
    programs: int
    seed: int
    mix: training.Mix = MIX
    count: str = "tokens"
    engines: int = 1
    cv: float | None = None
    length_error: float = 0.5
    trained_on: training.Mix | None = None


@dataclass(frozen=True, slots=True)
class LabFigures:
    """The figures of a run.

    Goodput per second of arrivals; throughput: generated tokens per second of the run; processed: with prompt tokens.
    `never`: for each latency the share (0 to 1) of requests or programs for which it never came before the run's end.
    """

    tokens_per_s: float
    requests_per_s: float
    attained: float
    throughput: float
    processed: float
    calls: int
    by_kind: Mapping[str, float]
    ttft: tuple[float, float]
    tbt: tuple[float, float]
    deadline_e2e: tuple[float, float]
    compound_e2e: tuple[float, float]
    never: Mapping[str, float]
    evictions: int
    per_minute: tuple[float, ...]


@cache
def coefficients() -> LatencyCoefficients:
    profile = read_profile(f"{PROFILE}#{PROFILE_ID}")
    prefill, decode = profile["prefill"], profile["decode"]
    return LatencyCoefficients(*(float(prefill[key]) for key in "abc"), *(float(decode[key]) for key in "abc"))


@cache
def _trace() -> tuple[float, ...]:
    return tuple(row.at for row in read_trace(str(TRACE)))


def arrivals(case: Case) -> list[float]:
    """The trace from an offset that depends on the seed, repeated as often as needed, with its clock scaled to the
    rate.
    """
    if case.cv is not None:
        rng = np.random.default_rng([case.seed, 5])
        return renewal_times(rng, case.rate, count=case.programs, cv=case.cv)
    at = np.asarray(_trace())
    gaps = np.diff(at, append=at[-1] + (at[-1] - at[0]) / (len(at) - 1))
    offset = (case.seed * 3_863) % len(gaps)
    chosen = np.take(gaps, range(offset, offset + case.programs), mode="wrap")
    times: list[float] = (np.cumsum(chosen) * (case.programs / case.rate / chosen.sum())).tolist()
    return times


def foresight(system: System, case: Case) -> Foresight:
    if system.foresight == "trained":
        own = Trained(analyser_of(case))
        return Exchanged(own, system.exchanged) if system.exchanged else own
    if system.foresight == "oracle":
        return Oracle()
    if system.foresight == "blind":
        return Blind(MEAN_OUTPUT, MEAN_TOKENS)
    if system.foresight == "blind_to_stages":
        return BlindToStages(MEAN_OUTPUT, MEAN_TOKENS)
    return Noisy(length_error=case.length_error, seed=case.seed)


def instance(system: System, count: str = "tokens") -> InstanceSettings:
    settings = dict(system.settings)
    seats = system.slots
    if issubclass(BATCHINGS[system.batching], Pausing):
        settings["slots"] = system.slots
        seats = min(system.budget, PAUSED * system.slots)
    if system.batching == "calm":
        settings.setdefault("prefill_s", coefficients().prefill_b)
        settings.setdefault("starvation", 0.5 if count == "tokens" else 0.5 * PER_REQUEST)
    return InstanceSettings(
        coefficients(),
        kv_tokens=KV_TOKENS,
        max_num_seqs=seats,
        max_num_batched_tokens=system.budget,
        max_model_len=16_384,
        prefix_caching=False,
        batching=system.batching,
        batching_settings=settings,
    )


def programs_of(system: System, case: Case, times: Sequence[float]) -> Programs:
    """Stages are predicted to take what they took lately, or `history` times what they take in a full batch."""
    full = full_batch()
    return Programs(
        case.mix.programs(times, case.seed),
        foresight(system, case),
        full if system.history is None else Speeds(system.history * full.token_s, full.prefill_s),
        case.count,
        StagePace() if system.history is None else None,
        system.rule,
    )


def full_batch() -> Speeds:
    token_s = LatencyModel(coefficients()).decode(FULL_BATCH, FULL_BATCH * 1000)
    return Speeds(token_s, coefficients().prefill_b)


def run(system: System, case: Case, engine: InstanceSettings | None = None) -> LabFigures:
    """`engine` None: the system's own."""
    times = arrivals(case)
    return _figures(_result(system, case, programs_of(system, case, times), engine), times[-1])


class Lab:
    """Runs of systems by name, each made once."""

    def __init__(self, systems: Mapping[str, System], quick: bool, progress: Progress) -> None:
        self.systems = dict(systems)
        self.quick = quick
        self.progress = progress
        self._done: dict[tuple[str, Case], LabFigures] = {}

    def figures(self, name: str, case: Case) -> LabFigures:
        key = (name, case)
        if key not in self._done:
            self._done[key] = run(self.systems[name], case)
            found = self._done[key]
            self.progress(
                f"{name} at {case.rate:g}/s, seed {case.seed}, {case.programs} programs: "
                f"{found.tokens_per_s:.0f} tokens/s, {found.attained:.3f} attained"
            )
        return self._done[key]


def analyser_of(case: Case) -> TrainedAnalyser:
    """What runs of this case are told from. As much is recorded of each engine, whatever their number."""
    mix, programs = case.trained_on or case.mix, min(RECORDED * case.engines, case.programs)
    return analyser(
        replace(case, seed=training.RECORDING_SEED, programs=programs, count="tokens", mix=mix, trained_on=None)
    )


@cache
def analyser(case: Case) -> TrainedAnalyser:
    """Trained on other seeds of this mix, with graphs that were recorded at this rate by the run of `case`."""
    before = training.unloaded(case.mix, full_batch())
    watched = Trained(before)
    times = arrivals(case)
    driver = Programs(case.mix.programs(times, case.seed), watched, full_batch(), pace=StagePace())
    _result(CONCORD, case, driver)
    return training.observed(before, watched.recorded)


def _result(system: System, case: Case, programs: Programs, engine: InstanceSettings | None = None) -> RunResult:
    settings = SimulationSettings(
        (engine or instance(system, case.count),) * case.engines,
        cutoff_s=PATIENCE_S,
        progress_s=5.0,
        telemetry_period_s=5.0,
        sample_s=60.0,
    )
    policy = system.policy if case.engines == 1 or system.policy != "round_robin" else "least_outstanding"
    return Simulation(settings, build_dispatcher(policy), [], programs=programs).run()


def _figures(result: RunResult, span: float) -> LabFigures:
    programs = result.programs
    by_kind: dict[str, list[ProgramRecord]] = {}
    for program in programs:
        by_kind.setdefault(program.kind, []).append(program)
    latency = [record for record in result.records if record.slo_class == "latency"]
    seconds: dict[str, list[float | None]] = {
        "ttft": [record.ttft_s for record in latency],
        "tbt": [record.tpot_s for record in latency],
        "deadline_e2e": [program.e2e_s for program in by_kind.get("deadline", [])],
        "compound_e2e": [program.e2e_s for program in by_kind.get("compound", [])],
    }
    minutes = [0.0] * (int(span // 60) + 1)
    for program in programs:
        minutes[min(int(program.at // 60), len(minutes) - 1)] += program.earned / 60.0
    return LabFigures(
        tokens_per_s=sum(program.earned for program in programs) / span,
        requests_per_s=sum(program.attained for program in programs) / span,
        attained=sum(program.attained for program in programs) / len(programs),
        throughput=sum(use.generated_tokens for use in result.instances) / result.ended_at,
        processed=sum(use.generated_tokens + use.prompt_tokens for use in result.instances) / result.ended_at,
        calls=len(result.records),
        by_kind={kind: sum(p.attained for p in found) / len(found) for kind, found in sorted(by_kind.items())},
        ttft=_shares(seconds["ttft"]),
        tbt=_shares(seconds["tbt"]),
        deadline_e2e=_shares(seconds["deadline_e2e"]),
        compound_e2e=_shares(seconds["compound_e2e"]),
        never={key: found.count(None) / max(1, len(found)) for key, found in seconds.items()},
        evictions=sum(use.preemptions for use in result.instances),
        per_minute=tuple(minutes[:-1]),
    )


def _shares(seconds: Sequence[float | None]) -> tuple[float, float]:
    """p50 and p95; what never came is infinitely late."""
    ascending = sorted(float("inf") if value is None else value for value in seconds)
    return quantile(ascending, 0.5) or 0.0, quantile(ascending, 0.95) or 0.0


def mean(found: Sequence[LabFigures], key: str) -> float:
    return float(statistics.fmean(getattr(each, key) for each in found))
