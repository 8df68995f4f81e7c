"""When is what a process published too old to be taken for now? One rule for jobs, gateways, API and pages."""

from __future__ import annotations

STALE_PERIODS = 3.0  # nobody acts on a snapshot older than three of its publisher's periods
STALE_AT_LEAST_S = 3.0  # for people: a period of 50 ms does not make a message late by a blink stale


def stale_after_s(period_s: float) -> float:
    """The age in seconds above which what is published every `period_s` is shown as old."""
    return max(STALE_AT_LEAST_S, STALE_PERIODS * period_s)


def is_fresh(at: float, period_s: float, now: float) -> bool:
    """`at` and `now` on one clock, seconds."""
    return now - at <= stale_after_s(period_s)
