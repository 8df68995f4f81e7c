"""The combined policy set `slackline` on each paper's home workload, beside the best of that paper's own.

One set, by what a stage of the fleet is: dispatcher `slackline` everywhere; collocated engines run their own scheduler,
with CALM where deadlines and workflows are promised; prefill engines preempt by S-EDF with SLO-aware batching; decode
engines run slack-guided decode. Engines that choose by value themselves are sent everything.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.reproduce import concord_lab, flowprefill_setting, hyperflexis_setting, kairos_setting
from benchmarks.reproduce.claims import Claim, Progress, Section, Table
from benchmarks.reproduce.kairos_stages import Stages
from controller.simulator.mixes import MIXES

TEXT = """`slackline` as a whole: the dispatcher of that name in front; **collocated** engines under their own scheduler
with the deadline as priority, and CALM (`calm`) where classes with end-to-end deadlines or workflows are
served; **prefill** engines `--scheduler preemptive` (S-EDF, SLO-aware batching, operator boundaries);
**decode** engines `kairos_decode`. The dispatcher holds nothing back from an engine whose policy chooses by
value among all it has (`selects`). Each row is the paper's home workload in the setting of its own section; "at
least as good" allows the spread of the seeds.
"""
WITHIN = 0.98  # of the other's figure: about the spread between seeds


def reproduce(progress: Progress, quick: bool) -> Section:
    claims = [
        *_hyperflexis(progress, quick),
        *_flowprefill(progress, quick),
        *_kairos(progress, quick),
        *_concord(progress, quick),
    ]
    rows = [[claim.figure, claim.claim, claim.theirs, claim.ours] for claim in claims]
    table = Table("Combined set beside each paper's best", ["home workload", "figure", "paper's own", "combined"], rows)
    return Section("Combined", TEXT, claims, [table])


def _claim(
    home: str, what: str, theirs: float, ours: float, setting: str, seeds: Sequence[int], reason: str = ""
) -> Claim:
    reached = ours >= WITHIN * theirs
    return Claim("Combined", home, what, theirs, ours, reached, setting, tuple(seeds), reason)


def _hyperflexis(progress: Progress, quick: bool) -> list[Claim]:
    lab, seeds = hyperflexis_setting, (1,) if quick else (1, 2, 3)
    model = lab.MODELS["Qwen32B"]
    found = []
    for mix, rate in (("4-task", 44.0), ("2-task", 16.0)):
        shares = {
            name: lab.measure(
                lab.fleet(model), lab.CONTENDERS[name], lab.of_mix(MIXES[mix], rate, 40 if quick else 300), seeds
            ).attainment
            for name in lab.OURS
        }
        ours, theirs = (shares[name] for name in lab.OURS)
        setting = f"Qwen32B, two workers, {rate:g} requests/s"
        found.append(_claim("HyperFlexis", f"attainment, {mix} mix", theirs, ours, setting, seeds))
        progress(f"HyperFlexis {mix}: {theirs:.3f}, combined {ours:.3f}")
    return found


def _flowprefill(progress: Progress, quick: bool) -> list[Claim]:
    lab, seeds = flowprefill_setting, (1,) if quick else (1, 2, 3)
    model = lab.MODELS["Llama3-8B"]
    load = lab.Load(model, 120 if quick else 1000, seeds)
    own = lab.flowprefill()
    combined = replace(own, label="combined", policy_set="slackline")
    bench = lab.Bench()
    theirs, ours = (bench.goodput(each, load, 4.0) for each in (own, combined))
    progress(f"FlowPrefill: {theirs:.2f}/s, combined {ours:.2f}/s")
    return [_claim("FlowPrefill", "goodput, requests/s at 90 %", theirs, ours, "Llama3-8B, one prefill engine", seeds)]


def _kairos(progress: Progress, quick: bool) -> list[Claim]:
    lab, seeds = kairos_setting, (1,) if quick else (1, 2, 3)
    found = []
    for rate in (3.0,) if quick else (3.0, 4.0):
        both = []
        for name in (lab.KAIROS, "S-EDF prefill (FlowPrefill), slack decode"):
            runs = [
                lab.Figures(
                    Stages(lab.TESTBED, *lab.PAIRS[name]).run(lab.long_tail(rate, seed, 200 if quick else 1000))
                )
                for seed in seeds
            ]
            both.append(statistics.median(each.e2e for each in runs))
        found.append(
            _claim("Kairos", f"attainment of both, per cent, QPS {rate:g}", both[0], both[1], "4P+4D, long tail", seeds)
        )
        progress(f"Kairos QPS {rate:g}: {both[0]:.1f}, combined {both[1]:.1f}")
    return found


def _concord(progress: Progress, quick: bool) -> list[Claim]:
    lab, seeds = concord_lab, (1,) if quick else (2, 3)
    cases = [lab.Case(3.0, 60 if quick else 1000, seed) for seed in seeds]
    own = [lab.run(lab.CONCORD, case) for case in cases]
    combined = [lab.run(lab.CONCORD.variant(policy="slackline"), case) for case in cases]
    found = []
    for key, what in (("tokens_per_s", "token goodput, tokens/s"), ("requests_per_s", "request goodput, programs/s")):
        theirs, ours = lab.mean(own, key), lab.mean(combined, key)
        found.append(_claim("Concord", what, theirs, ours, "one engine, 3 programs/s", seeds))
        progress(f"Concord {what}: {theirs:.4g}, combined {ours:.4g}")
    return found
