"""The combined set in Kairos' setting: dispatcher, prefill engine, migrator, link and decode engine, all simulated."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.reproduce.claims import Claim, Progress, Table
from benchmarks.reproduce.combined.pairs import compare
from benchmarks.reproduce.kairos import setting as lab
from benchmarks.reproduce.kairos.stages import BLOCK, MAX_MODEL_LEN, PREFILL_BLOCKS, StageCall, StagePolicy
from controller.core.steps import Step
from controller.core.types import LatencyCoefficients, Targets
from controller.dispatch import build_dispatcher, build_migrator
from controller.policies.by_stage import BY_STAGE
from controller.predict.latency_fit import DecodeSample, PrefillSample, fit
from controller.simulator import Demand, InstanceSettings, RunResult, Simulation, SimulationSettings
from controller.simulator.network import LinkSettings

KV_BYTES = 131_072  # per token; only its ratio to the link's speed matters
LINK = LinkSettings(bandwidth_gb_s=lab.TESTBED.link_tokens_per_s * KV_BYTES / 1e9, latency_s=0.0)
PATIENT_S = 1e9
OWN = (lab.KAIROS, lab.KAIROS_PRINTED)
CALIBRATED_AT, CALIBRATION_SEED = 3.0, 77
MIGRATOR = (
    "the loss is in TPOT, most of it before the decode engine (table of parts exchanged). The migrator keeps a "
    "step within the TPOT by eq. 2, which adds up the lengths of sequences. On this device only the longest "
    "sets the pace, which eq. 2 cannot fit well, and at light load requests wait although there is room for "
    "them. At higher load, waiting protects the targets of the requests that were placed. The rest comes from "
    "the decode engine's table, which starts with the same profile"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode engine, and the dispatcher. A policy of None: as with `--scheduler slackline`."""

    policies: tuple[StagePolicy | None, StagePolicy | None] = (None, None)
    policy_set: str = "least_outstanding"  # with one engine per stage: everything at once
    overrides: Mapping[str, Any] = field(default_factory=dict)
    decode_settings: Mapping[str, Any] = field(default_factory=dict)


SET = Pair(policy_set=BY_STAGE)
AT_ONCE = {"migration": {"name": "least_outstanding"}}


def engines(pair: Pair, believed: LatencyCoefficients | None) -> tuple[InstanceSettings, InstanceSettings]:
    """With the testbed's sizes (kairos.stages)."""
    bed = lab.TESTBED
    prefill = InstanceSettings(
        bed.latency,
        kv_tokens=PREFILL_BLOCKS * BLOCK,
        max_num_seqs=512,
        max_num_batched_tokens=bed.chunk,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK,
        prefix_caching=False,
        kv_bytes_per_token=KV_BYTES,
        role="prefill",
        decode_by=bed.decode_by,
        model_shape="qwen3-30b-a3b",  # a mixture of experts too; the ends of its operators matter only by milliseconds
        believed=believed,
    )
    decode = replace(
        prefill, role="decode", kv_tokens=bed.kv_tokens, max_num_seqs=bed.decode_slots, max_num_batched_tokens=2048
    )
    first, second = (_with(policy, engine) for policy, engine in zip(pair.policies, (prefill, decode), strict=True))
    return first, replace(second, batching_settings={**second.batching_settings, **pair.decode_settings})


def _with(policy: StagePolicy | None, engine: InstanceSettings) -> InstanceSettings:
    if policy is None:
        return replace(engine, engine_kind=BY_STAGE)
    return replace(engine, batching=policy.batching, batching_settings=policy.settings, scheduling_policy="fcfs")


def demands(calls: Sequence[StageCall]) -> list[Demand]:
    targets = Targets(lab.TTFT_S, lab.TPOT_S, None, PATIENT_S)
    return [
        Demand(f"r{number}", call.at, call.prompt_tokens, call.output_tokens, targets, "agent",
               max_tokens=call.output_tokens)
        for number, call in enumerate(calls)
    ]  # fmt: skip


def simulation(pair: Pair, calls: Sequence[StageCall], believed: LatencyCoefficients | None = None) -> Simulation:
    settings = SimulationSettings(engines(pair, believed), links=LINK, sample_s=1e6)
    front = build_dispatcher(pair.policy_set, pair.overrides), build_migrator(pair.policy_set, pair.overrides)
    return Simulation(settings, front[0], demands(calls), migrator=front[1])


def attained(result: RunResult) -> float:
    """Share that meets both targets, per cent; a single token meets any TPOT."""
    return 100 * statistics.fmean(record.attained for record in result.records)


def calibrated(count: int) -> LatencyCoefficients:
    """Eq. 1 and 2 fitted to the steps of a run of Kairos' own policies."""
    found = simulation(_own(lab.KAIROS), lab.long_tail(CALIBRATED_AT, CALIBRATION_SEED, count))
    prefills: list[PrefillSample] = []
    decodes: list[DecodeSample] = []

    def watch(_: str, step: Step, repeats: int, began: float, ended: float) -> None:
        if step.decodes:
            decodes.append(DecodeSample(len(step.decodes), step.context_sum, (ended - began) / repeats))
        else:
            squares = sum(chunk.length * (chunk.length + 2 * chunk.start) for chunk in step.chunks)
            prefills.append(PrefillSample(sum(chunk.length for chunk in step.chunks), squares, ended - began))

    found.cluster.watch = watch
    found.run()
    return fit(prefills, decodes).coefficients


def _own(name: str) -> Pair:
    return Pair(lab.PAIRS[name])


def kairos(progress: Progress, quick: bool) -> Iterator[Claim]:
    """At each load, beside the better of the paper's two readings."""
    seeds, count = (1,) if quick else (1, 2, 3), 200 if quick else 1000
    believed = calibrated(count)
    for rate in (3.0,) if quick else (2.0, 3.0, 4.0, 5.0):
        calls = [lab.long_tail(rate, seed, count) for seed in seeds]
        theirs = {name: [attained(simulation(_own(name), each).run()) for each in calls] for name in OWN}
        ours = [attained(simulation(SET, each, believed).run()) for each in calls]
        name = max(theirs, key=lambda each: sum(theirs[each]))
        setting = f"4P+4D, long tail, QPS {rate:g}; {name}"
        yield compare("Kairos", "attainment of both (%)", setting, theirs[name], ours, seeds, MIGRATOR)
        progress(f"Kairos QPS {rate:g} done")


def exchanged(quick: bool) -> Table:
    """The effect of each part of the set in Kairos' setting."""
    seeds, count = (1,) if quick else (1, 2, 3), 200 if quick else 1000
    believed = calibrated(count)
    at_once = replace(SET, overrides=AT_ONCE)
    times = {key: lab.SLACK.settings[key] for key in ("decode_a", "decode_b", "decode_c", "profile")}
    cases = {
        lab.KAIROS: (_own(lab.KAIROS), None),
        "set": (SET, believed),
        "set with Kairos' prefill": (replace(SET, policies=(lab.URGENCY, None)), believed),
        "set, decode at once": (at_once, believed),
        "set, decode at once, its table from the device's true times": (
            replace(at_once, decode_settings=times), believed,
        ),
    }  # fmt: skip
    rows: list[list[str | float | int | None]] = []
    for name, (pair, profile) in cases.items():
        row: list[str | float | int | None] = [name]
        for rate in (3.0,) if quick else (2.0, 3.0):
            runs = [simulation(pair, lab.long_tail(rate, seed, count), profile).run().records for seed in seeds]
            for kept in ("ttft_met", "tpot_met", "attained"):
                row.append(
                    round(100 * statistics.fmean(getattr(each, kept) for records in runs for each in records), 1)
                )
        rows.append(row)
    loads = ("3",) if quick else ("2", "3")
    columns = ["", *(f"QPS {load}: {what}" for load in loads for what in ("TTFT %", "TPOT %", "both %"))]
    return Table("Kairos' setting: parts of the set exchanged, means over seeds", columns, rows)
