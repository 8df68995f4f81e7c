"""FlowPrefill, Fig. 14 to 16: one SLO for all, with chunks, and prefill and decode on one device."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import PRINTED_STRONGER, Claim, Plot, Progress, Table
from benchmarks.reproduce.flowprefill.setting import (
    CV,
    LEVEL,
    MODELS,
    PAPER,
    EngineContender,
    FlowPrefillModel,
    OfferedLoad,
    PrefillBench,
    Rows,
    SectionPart,
    Size,
    chunked,
    claimed,
    class_priority,
    flowprefill,
    run,
)
from controller.core.types import Targets
from controller.engine import PreemptivePrefill
from controller.simulator import Demand
from controller.simulator.workloads import mixes, qwen
from controller.simulator.workloads.arrivals import Lengths
from controller.simulator.workloads.mixes import PATIENT_S, Task

LLAMA = MODELS["Llama3-8B"]
FLOW, CP2K, TODAY = flowprefill(), chunked(2048), class_priority(2048)
SAME = (
    "within 3 % counts as the same. Past the knee a batch is only as large as the time of its most urgent "
    "prompt allows, and late prompts go last: more steps pay the constant, and the run ends later"
)
NO_KNEE = "DistServe-CP2K holds 90 % at every rate run"
CHAT = Task("chat", Targets(0.25, 1.0, None, PATIENT_S), Lengths(259.19, 324.88, 4, 2000, "lognormal"), qwen.ONE)


def past_knee(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Points of attainment by which the first of each pair is ahead, at rates where the second is below LEVEL."""
    return [round(100 * (ours - theirs), 2) for ours, theirs in pairs if theirs < LEVEL]


def single_slo(size: Size, progress: Progress) -> SectionPart:
    """Fig. 14: 500 ShareGPT prompts below 2K tokens, Poisson, the chatbot's TTFT, up to rates that neither sustains."""
    rows: Rows = []
    ratios: list[float] = []
    pairs: list[tuple[float, float]] = []
    rates = (40.0, 70.0) if size.quick else (10.0, 20.0, 30.0, 40.0, 50.0, 55.0, 60.0, 65.0, 70.0)
    for rate in rates:
        shares, speeds = {}, {}
        for each in (FLOW, CP2K, TODAY):
            found = []
            for seed in size.seeds:
                drawn = mixes.demands((CHAT,), 1.0, seed, per_task=500)
                result, _ = run(each, LLAMA, [replace(demand, at=demand.at / rate) for demand in drawn])
                met = statistics.fmean(record.ttft_met for record in result.records)
                found.append((met, sum(record.prompt_tokens for record in result.records) / result.ended_at))
            shares[each.label] = statistics.median(met for met, _ in found)
            speeds[each.label] = statistics.median(speed for _, speed in found)
            rows.append([rate, each.label, shares[each.label], speeds[each.label]])
        ratios.append(speeds[FLOW.label] / speeds[CP2K.label])
        pairs.append((shares[FLOW.label], shares[CP2K.label]))
    progress(f"Fig. 14: throughput ratios {ratios}, attainment {pairs}")
    setting = "Llama3-8B, 500 prompts of ShareGPT's mean and deviation below 2K, TTFT 0.25 s"
    leads = past_knee(pairs)
    past = "attainment above DistServe-CP2K where it is below 90 %, {} over the rates (points)"
    claims = [
        replace(
            claimed("Fig. 14", "throughput over DistServe-CP2K, lowest over the rates (factor)", 1.0, min(ratios), size,
                    setting),
            reached=min(ratios) >= 0.97,
            reason=SAME,
        ),
        *(
            Claim(PAPER, "Fig. 14", past.format(word), None, pick(leads) if leads else None,
                  pick(leads) > 0 if leads else None, setting, list(size.seeds), "" if leads else NO_KNEE, bar=0.0)
            for word, pick in (("least", min), ("most", max))
        ),
    ]  # fmt: skip
    titles = ["requests/s", "system", "attainment", "prompt tokens/s"]
    return SectionPart(claims, [Table("Fig. 14: one SLO, Llama3-8B", titles, rows)], [])


def with_chunks(
    bench: PrefillBench, size: Size, progress: Progress, model: FlowPrefillModel = LLAMA, device: str = ""
) -> SectionPart:
    """Fig. 15: operator boundaries, with long prompts also cut into chunks. `device`: what `model` was measured on."""
    load = OfferedLoad(model, size.count, size.seeds)
    begin = 6.0 * LLAMA.latency.prefill_b / model.latency.prefill_b  # requests/s from which the search goes
    where = f", on {device}" if device else ""
    contenders = [
        flowprefill(f"FlowPrefill, chunks of {tokens // 1024}K", {"chunk_tokens": tokens})
        for tokens in (1024, 2048, 4096, 8192, 16_384)
    ]
    rows: Rows = [[each.label, bench.goodput(each, load, begin)] for each in contenders]
    whole = bench.goodput(FLOW, load, begin)
    rows.append(["FlowPrefill, whole prompts", whole])
    progress(f"Fig. 15{where}: {rows}")
    rates = [rate for _, rate in rows[:-1] if isinstance(rate, float)]
    middle = max(rates[2:4])
    setting = "Llama3-8B, operator boundaries" + (f"; operators and steps measured on {device}" if device else "")
    reason = ""
    if middle <= rates[4]:
        reason = cut_reason(longest_wait_s(FLOW, load, whole), longest_wait_s(contenders[3], load, whole))
    claims = [
        claimed(
            "Fig. 15",
            f"best of 4K and 8K chunks over 2K chunks{where} (factor)",
            None,
            middle / rates[1],
            size,
            setting,
        ),
        claimed(
            "Fig. 15",
            f"best of 4K and 8K chunks over 16K chunks{where} (factor)",
            None,
            middle / rates[4],
            size,
            setting,
            reason,
        ),
    ]
    return SectionPart(
        claims, [Table(f"Fig. 15: with chunked prefill{where}", ["system", "goodput, requests/s"], rows)], []
    )


def longest_wait_s(contender: EngineContender, load: OfferedLoad, rate: float) -> float:
    """The longest that a signal waited for the end of an operator, in the runs of all seeds."""
    runs = [run(contender, load.model, load.demands(rate, seed))[1] for seed in load.seeds]
    engines = [each.engine for simulation in runs for each in simulation.cluster]
    return max(engine.rounds.blocking_max_s for engine in engines if isinstance(engine, PreemptivePrefill))


def cut_reason(whole_s: float, cut_s: float) -> str:
    """Why chunks gain nothing here: what they save of a wait, beside the tightest target."""
    tightest = min(task.targets.ttft_s for task in qwen.tasks(LLAMA.slo))
    return (
        f"the longest wait for the end of an operator is {1000 * whole_s:.1f} ms with whole prompts and "
        f"{1000 * cut_s:.1f} ms with chunks of 8K, where the tightest target is {1000 * tightest:.0f} ms: chunks save "
        f"{100 * max(0.0, whole_s - cut_s) / tightest:.1f} % of it at most, and each costs a step. The paper's "
        "largest chunks lose on its device; it does not say how long its operators take"
    )


def collocated(size: Size, progress: Progress) -> SectionPart:
    """Fig. 16: TTFT x 3, mean TBT 0.1 and 0.2 s. FlowPrefill decodes between operators, not beside the prefill."""
    flow = flowprefill()
    vllm = EngineContender("vLLM-CP2K", {"batching": "vllm_v1", "scheduling_policy": "fcfs"})
    today = EngineContender("vLLM-CP2K, class priority", {"batching": "vllm_v1"}, "engine_priority_class")
    rates = (2.0, 4.0) if size.quick else (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    tasks = qwen.tasks(LLAMA.slo, decode=True, ttft_factor=3.0)
    series: dict[str, list[tuple[float, float]]] = {}
    rows: Rows = []
    ttft, tbt, over_today = [], [], []
    for rate in rates:
        seen = {}
        for each in (flow, vllm, today):
            pairs = [_met(each, qwen.demands(tasks, rate, seed, size.count, CV)) for seed in size.seeds]
            seen[each.label] = tuple(statistics.median(values) for values in zip(*pairs, strict=True))
            series.setdefault(f"{each.label}, TTFT", []).append((rate, seen[each.label][0]))
            series.setdefault(f"{each.label}, TBT", []).append((rate, seen[each.label][1]))
            rows.append([rate, each.label, *seen[each.label]])
        ttft.append(seen[flow.label][0] / max(1e-3, seen[vllm.label][0]))
        tbt.append(seen[flow.label][1] / max(1e-3, seen[vllm.label][1]))
        over_today.append(seen[flow.label][0] / max(1e-3, seen[today.label][0]))
        progress(f"Fig. 16 at {rate}: {seen}")
    setting = "Llama3-8B on one device, 343 output tokens on average (assumed), TTFT x 3"
    reason = (
        "ours shares one device in time: decode steps of all sequences run between operators, at the last "
        "moment that their mean TBT allows; the paper runs both at the same time on one device. Mean time per "
        "token, not each gap"
    )
    claims = [
        claimed("Fig. 16", "TTFT attainment over vLLM-CP2K, highest over the rates (factor)", None, max(ttft), size,
                setting, reason),
        claimed("Fig. 16", "TBT attainment over vLLM-CP2K, up to (factor)", 1.6, max(tbt), size, setting, reason),
        claimed("Fig. 16", "TTFT attainment over vLLM-CP2K with class priorities, highest over the rates "
                "(factor; not in the paper)", None, max(over_today), size, setting, reason, PRINTED_STRONGER),
    ]  # fmt: skip
    titles = ["requests/s", "system", "TTFT attainment", "TBT attainment"]
    plot = Plot("flowprefill-16", "One device for both phases", "requests/s", "attainment", series, LEVEL)
    return SectionPart(claims, [Table("Fig. 16: prefill and decode on one device", titles, rows)], [plot])


def _met(contender: EngineContender, demands: Sequence[Demand]) -> tuple[float, float]:
    result, _ = run(contender, LLAMA, demands)
    return (
        statistics.fmean(record.ttft_met for record in result.records),
        statistics.fmean(record.tpot_met for record in result.records),
    )
