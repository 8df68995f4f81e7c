"""Concord, Figure 6.2: goodput counted in requests, which only CALM is told; the others do not use goodput."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.reproduce.claims import Claim
from benchmarks.reproduce.concord.lab import LTR, Case, Lab, mean
from benchmarks.reproduce.concord.oracle import HEADLINE

PAPER = 2.3  # times LTR's, at least


def request_goodput(lab: Lab, calm: str, programs: int, seeds: Sequence[int], setting: str) -> Claim:
    """`calm`: by its name in the lab. `programs`: of each seed."""
    own = [lab.figures(calm, told_requests(programs, seed)) for seed in seeds]
    ltr = [lab.figures(LTR.name, Case(HEADLINE, programs, seed)) for seed in seeds]
    times = statistics.fmean(
        mine.requests_per_s / max(1e-9, other.requests_per_s) for mine, other in zip(own, ltr, strict=True)
    )
    most = HEADLINE / max(1e-9, mean(ltr, "requests_per_s"))
    reason = (
        "LTR serves short requests first, and two thirds of the requests are single and short. It serves most "
        f"of these in time, and all requests that arrive would be {most:.2f} times what it serves. The paper "
        "does not explain why its LTR loses them"
    )
    return Claim(
        "concord", "Fig. 6.2", "request goodput over LTR (factor; the paper: 2.3 to 4.5)", PAPER, round(times, 3),
        times >= PAPER, setting, list(seeds), "" if times >= PAPER else reason,
    )  # fmt: skip


def told_requests(programs: int, seed: int) -> Case:
    """At the headline's rate, a run of which CALM is told that goodput is counted in requests."""
    return Case(HEADLINE, programs, seed, count="requests")
