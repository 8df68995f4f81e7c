"""Concord, Figure 6.6: TTFT, time between tokens and end-to-end latency by request type, at the headline load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.reproduce.claims import Claim
from benchmarks.reproduce.concord.lab import CONCORD, LTR, SARATHI, LabFigures
from benchmarks.reproduce.concord.sweep import finite

WHAT = {  # and the least ratio that agrees with the paper's words: shorter, or for TBT "without excessive"
    "ttft": ("TTFT of latency-sensitive requests", 1.0),
    "tbt": ("time between tokens of latency-sensitive requests", 0.9),
    "deadline_e2e": ("end-to-end latency of deadline-sensitive requests", 1.0),
    "compound_e2e": ("end-to-end latency of compound requests", 1.0),
}
SHOWN = (
    "the paper shows bars without numbers: reached if ours is not longer (time between tokens: at most a tenth "
    "longer). Autellix's is in the table"
)
NEVER = (
    "above the capacity of the engine Concord leaves late requests until no other needs the time, and what has not "
    "ended 120 s after the last arrival is cut"
)


def latencies(runs: Mapping[str, Sequence[LabFigures]], seeds: Sequence[int], setting: str) -> list[Claim]:
    """Median and p95 of a baseline's over Concord's, rounded as in the table; no figure if one never came."""
    made: list[Claim] = []
    for name in (SARATHI.name, LTR.name):
        for key, (what, least) in WHAT.items():
            for place, quantile in enumerate(("median", "p95")):
                theirs, ours = (getattr(runs[each][0], key)[place] for each in (name, CONCORD.name))
                lost = runs[name][0].never[key], runs[CONCORD.name][0].never[key]
                ratio, reached, reason = over(theirs, ours, lost, least)
                text = f"{what}, {quantile}: {name}'s over Concord's (factor)"
                made.append(
                    Claim("concord", "Fig. 6.6", text, None, ratio, reached, setting, list(seeds), reason, bar=least)
                )
    return made


def over(
    theirs: float, ours: float, never: tuple[float, float], least: float = 1.0
) -> tuple[float | None, bool | None, str]:
    """Ratio of the rounded seconds, whether it is at least `least`, and the reason.

    `never`: the shares (0 to 1) of the baseline's and of Concord's that never came. Two latencies that both never end
    are not compared: None instead of a verdict, and the reason gives both shares.
    """
    lost = f"{100 * never[1]:.0f} % of Concord's and {100 * never[0]:.0f} % of the baseline's never come"
    if math.isinf(ours):
        if math.isinf(theirs):
            return None, None, f"not judged, since neither has this figure: {lost}; {NEVER}"
        return None, False, f"{lost}; {NEVER}"
    if math.isinf(theirs):
        return None, True, f"{SHOWN}. {lost}, and Concord's take {finite(ours)} s"
    ratio = (finite(theirs) or 0.0) / max(1e-9, finite(ours) or 0.0)
    return round(ratio, 3), ratio >= least, SHOWN
