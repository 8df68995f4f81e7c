"""Concord, Figure 6.6: TTFT, time between tokens and end-to-end latency by request type, at the headline load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.reproduce.claims import Claim
from benchmarks.reproduce.concord_lab import CONCORD, SARATHI, Figures
from benchmarks.reproduce.concord_sweep import finite

WHAT = {
    "ttft": "TTFT of latency-sensitive requests",
    "tbt": "time between tokens of latency-sensitive requests",
    "deadline_e2e": "end-to-end latency of deadline-sensitive requests",
    "compound_e2e": "end-to-end latency of compound requests",
}
SHOWN = (
    "the paper shows bars, no numbers: reached where ours is the shorter. LTR's and Autellix's stand in the table: "
    "they are built from descriptions"
)
NEVER = (
    "more than half of Concord's (p95: more than one in twenty) never come: past what the engine can serve it leaves "
    "those that are late until nobody else needs the time, and they are cut 120 s after the last arrival"
)


def latencies(runs: Mapping[str, Sequence[Figures]], seeds: Sequence[int], setting: str) -> list[Claim]:
    """Median and p95 of Sarathi-Serve's over Concord's, as the table rounds them; no figure where one never came."""
    made: list[Claim] = []
    for key, what in WHAT.items():
        for place, quantile in enumerate(("median", "p95")):
            theirs, ours = (getattr(runs[name][0], key)[place] for name in (SARATHI.name, CONCORD.name))
            ratio, reached, reason = over(theirs, ours)
            text = f"{what}, {quantile}: {SARATHI.name}'s over Concord's, times"
            made.append(Claim("concord", "Figure 6.6", text, None, ratio, reached, setting, list(seeds), reason))
    return made


def over(theirs: float, ours: float) -> tuple[float | None, bool, str]:
    """Ratio of the rounded seconds, whether ours is the shorter, and why."""
    if math.isinf(ours):
        return None, False, NEVER + (". Nor do the baseline's" if math.isinf(theirs) else "")
    if math.isinf(theirs):
        return None, True, f"{SHOWN}. The baseline's never come, Concord's take {finite(ours)} s"
    ratio = (finite(theirs) or 0.0) / max(1e-9, finite(ours) or 0.0)
    return round(ratio, 3), ratio > 1.0, SHOWN
