"""FlowPrefill in the simulator: Fig. 9 to 17, with each headline beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import Progress, Section
from benchmarks.reproduce.flowprefill.ablations import batching, blocking, orders, prediction
from benchmarks.reproduce.flowprefill.compatibility import collocated, single_slo, with_chunks
from benchmarks.reproduce.flowprefill.device import on_device
from benchmarks.reproduce.flowprefill.end_to_end import end_to_end, experts
from benchmarks.reproduce.flowprefill.setting import CV, MODELS, PAPER, PrefillBench, SectionPart, Size

TEXT = """
One prefill instance (the paper's 1P1D; its decode instance never delays a prefill) of {profiles};
kernel-composed profiles of A100-SXM-80GB for the paper's A800. {count} requests a run and seeds
{seeds}: the stand-in for the Qwen trace (lengths of Table 1, SLOs of Table 2), gamma arrivals with CV
{cv}, as published by the same provider; the trace's own arrivals are not published, and the table on
burstiness shows their influence. Attainment counts first tokens in time, the median over the seeds;
goodput is the highest rate at 90 %. It can exceed what the device could sustain for long, because a run
lasts about two minutes, as in the paper, and S-EDF serves late requests last.

FlowPrefill: rounds on arrival and completion, S-EDF, batches to 4,096 tokens, operator boundaries
composed from FLOP shares, measured all-reduces and the profile's attention term. DistServe: first come,
first served, whole prompts, the best of four settings for the number of prompts per step. CP2K and
CP8K: chunks in EDF order, where started prompts can be preempted between chunks and short ones share a
chunk; each chunk costs the profile's constant and its attention over the earlier chunks. The baselines'
sweep is below. "vLLM, class priority" is available today (with one SLO for all, Fig. 14, it is first
come, first served).

Fig. 10, 11 and 13 to 16 use only Llama3-8B; the table on burstiness has one seed. Fig. 13 (real against predicted
TTFT of three models) has no simulated counterpart, because there the device is the polynomial that predicts it.

Claims on one H100 (part `device`) come from measurements of the reference engine's PyTorch executor with random weights
of Llama-3.1-8B's shape (2026-11-28, torch 2.11.0, CUDA 13.0, driver 580.159.04), stored in docs/measurements. Fig. 15
is simulated with the lengths of its operators. Fig. 17's mixture of experts was not measured.
"""
PARTS = ("simulated", "prediction", "device")


def reproduce(progress: Progress, quick: bool, parts: Sequence[str] = PARTS) -> Section:
    """All parts, or some. `quick`: one model and seed, 150 requests per run, seconds; otherwise about ten minutes."""
    size = Size(150, (1,), True) if quick else Size(800, (1, 2, 3), False)
    bench = PrefillBench()
    made: list[tuple[str, SectionPart]] = []
    if "simulated" in parts:
        found = [end_to_end(bench, size, progress), orders(bench, size, progress), batching(bench, size, progress)]
        found += [blocking(size, progress), single_slo(size, progress)]
        found += [with_chunks(bench, size, progress), collocated(size, progress), experts(bench, size, progress)]
        made += [("simulated", each) for each in found]
    if "prediction" in parts:
        made.append(("prediction", prediction(bench, size, progress)))
    if "device" in parts:
        made.append(("device", on_device(bench, size, progress)))
    text = TEXT.format(
        profiles="; ".join(model.profile for model in MODELS.values()),
        count=f"{size.count:,}",
        seeds=", ".join(map(str, size.seeds)),
        cv=CV,
    )
    return Section(
        PAPER,
        text,
        [replace(claim, part=name) for name, part in made for claim in part.claims],
        [replace(table, part=name) for name, part in made for table in part.tables],
        [replace(plot, part=name) for name, part in made for plot in part.plots],
    )
