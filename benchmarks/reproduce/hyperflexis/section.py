"""HyperFlexis: Figures 3 to 8 and Table 2. The loads of Fig. 3 that scale out are the slowest part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import Claim, Plot, Progress, Section, Table
from benchmarks.reproduce.hyperflexis import mapping as hyperflexis_mapping
from benchmarks.reproduce.hyperflexis import multitask as hyperflexis_multitask
from benchmarks.reproduce.hyperflexis import one_task as hyperflexis_one_task
from benchmarks.reproduce.hyperflexis import scaling as hyperflexis_scaling
from benchmarks.reproduce.hyperflexis import slots as hyperflexis_slots
from benchmarks.reproduce.hyperflexis import stages as hyperflexis_stages
from benchmarks.reproduce.hyperflexis.setting import MODELS

Found = tuple[list[Claim], list[Table], list[Plot]]
SETTINGS = """
Models use the nearest profiles of `benchmarks/data/latency_profiles.json`: {profiles}. The factors slow
them down so that HyperFlexis' own knee on WikiSQL alone is that of its Fig. 7 (40 and 12 requests/s on
its NPUs). Engines take 32 sequences (those of `make bench-vllm`; the paper gives no number, so
Fig. 3 is also run with other numbers on one model, by two seeds, and Fig. 6 with 64 and 256) and 2,048
tokens a step with vLLM's batching (`vllm_v1`), no prefix cache; weights load in the seconds of its
Table 2.

Workloads are its Table 1: {per_task} requests a task, Poisson, each task at an equal share of the rate,
seeds {seeds}; clients give their output length as `max_tokens`. Loads are multiples of the rate at
which round robin on the same instances attains 90 %. Requests have no waiting time: a late answer is a
miss, not an error. Cost is provisioned instance time (eq. 3) in units of 50 ms, from the start of the
run to its last answer; latency is over answered requests.

*hyperflexis (as printed)* is Alg. 1 with its unspecified branches filled in; *slackline* is the default
policy set. Round robin stands for Llumnix with round robin; *engine priority by class* is what engines
offer today, and appears in every figure; with a single task (Fig. 7) it equals round robin. SCORPIO
follows its public scheduler in three forms: *behind round robin* as in the paper (sec. 7.4: one on each
worker, with its own queue; answers paced by credits; requests deferred rather than refused, since the
latencies and costs in the paper are possible only if all requests are answered), and two stronger ones
with one queue for both workers: *as published* (it refuses) and *at its best* of all settings, chosen
for each mix by the sweep. ALADDIN and the annealer are built from abstracts, summaries and HyperFlexis'
description, since neither the full papers nor the authors' code was available, so their claims are not
judged. They also run at the best of their sweep.

The paper gives neither SCORPIO's settings, nor the thresholds of its own scaler, nor the loads of Fig. 4. The first
two are swept here; the loads of Fig. 4 are multiples of round robin's 90 % point, as everywhere.

Smaller settings than in the figures: SCORPIO's sweep and the sweep of the scaler's thresholds for Fig. 3 use {swept}
alone; that for Fig. 4 uses two of its loads and one seed.
Models: Fig. 3 and Table 2 three, Fig. 4, 5 and 7 two, Fig. 6 and 8 one (the paper has Qwen32B in Fig. 8
and does not name Fig. 6's).
"""


PER_TASK, SEEDS = 300, (1, 2, 3)
PARTS = ("fig3", "slots", "fig4", "fig5", "fig6", "fig7", "fig8", "table2")


def reproduce(progress: Progress, quick: bool, parts: Sequence[str] = PARTS) -> Section:
    """All figures in turn, or `parts` of them. `quick`: one model and seed, 80 requests per task, two loads."""
    seeds = SEEDS[:1] if quick else SEEDS
    per_task = 80 if quick else PER_TASK
    two = ("Qwen7B",) if quick else ("Qwen7B", "Qwen32B")
    three = two if quick else tuple(MODELS)
    times = (1.0, 2.0) if quick else None
    claims: list[Claim] = []
    tables: list[Table] = []
    plots: list[Plot] = []
    runs: dict[str, Callable[[], Found]] = {
        "fig3": lambda: hyperflexis_multitask.reproduce(
            progress, three, times or hyperflexis_multitask.TIMES, per_task, seeds
        ),
        "slots": lambda: hyperflexis_slots.reproduce(
            progress,
            two[-1],
            times or hyperflexis_slots.TIMES,
            per_task,
            seeds[:2],
            hyperflexis_slots.BATCHES[-1:] if quick else hyperflexis_slots.BATCHES,
        ),
        "fig4": lambda: hyperflexis_stages.figure_4(progress, two, times or hyperflexis_stages.TIMES, per_task, seeds),
        "fig5": lambda: hyperflexis_mapping.figure_5(
            progress, two, times or hyperflexis_mapping.FIG5_TIMES, per_task, seeds
        ),
        "fig6": lambda: hyperflexis_mapping.figure_6(progress, "Qwen7B", seeds, 18.0 if quick else 90.0),
        "fig7": lambda: hyperflexis_one_task.figure_7(
            progress, two, times or hyperflexis_one_task.FIG7_TIMES, per_task, seeds
        ),
        "fig8": lambda: hyperflexis_scaling.figure_8(progress, "Qwen32B", times or (1.0, 2.0, 3.0), per_task, seeds),
        "table2": lambda: hyperflexis_scaling.table_2(progress, three, 2.0, per_task, seeds),
    }
    for part in PARTS:
        if part in parts:
            made, shown, drawn = runs[part]()
            claims += [replace(each, part=part) for each in made]
            tables += [replace(each, part=part) for each in shown]
            plots += [replace(each, part=part) for each in drawn]
    return Section("HyperFlexis", settings_text(per_task, seeds, three[-1]), claims, tables, plots)


def settings_text(per_task: int = PER_TASK, seeds: Sequence[int] = SEEDS, swept: str = list(MODELS)[-1]) -> str:
    profiles = "; ".join(f"{m.name} on `{m.profile}` times {m.slowed:g}" for m in MODELS.values())
    return SETTINGS.format(profiles=profiles, per_task=per_task, seeds=", ".join(map(str, seeds)), swept=swept)


def retold(stored: Section) -> Section:
    """Stored results with today's text."""
    return replace(stored, settings_text=settings_text())
